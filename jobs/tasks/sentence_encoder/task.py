"""The task of training a sentence encoder: its documents, its module, and what the training loop runs on a worker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForMaskedLM, PreTrainedModel, PreTrainedTokenizerFast

from jobs.engine.export import open_export
from jobs.engine.hardware import worker_device
from jobs.engine.task import ParameterGroup, StepResult, Task
from jobs.tasks import base
from jobs.tasks.base import (
    DataReference,
    autocast_dtype,
    base_and_tempnet_groups,
    naming_field,
    to_device,
    unimodal_loss,
    unimodal_networks,
)
from jobs.tasks.config import check_sizes
from jobs.tasks.sentence_encoder.config import SentenceConfig
from jobs.tasks.text import cache_for, describe_data, find, prepare_split, prepare_training_text
from pipelines.sentences.spans import SpanSource
from pipelines.stream import Batch
from pipelines.text.growing import GrowingManifest
from pipelines.text.manifest import Manifest
from pipelines.text.packing import DocumentConfig
from pipelines.text.tokenization import SpecialTokens, load_tokenizer
from tempnet.baselines import compare_with_constants
from tempnet.contrastive.config import ContrastiveLossConfig, gamma_at
from tempnet.contrastive.losses import PairStatistics, held_out_losses
from tempnet.contrastive.retrieval import recall
from tempnet.contrastive.state import SampleState, World
from tempnet.models.sentence_encoder import IGNORE_INDEX, SpanOutput, TemperatureSentenceEncoder, num_positions
from tempnet.network import PAIRED_DIRECTORY
from tempnet.statistics import histogram_of

if TYPE_CHECKING:  # the driver, which builds the model to check it, does not need DeepSpeed
    from deepspeed import DeepSpeedEngine


class SentenceTask(Task[SentenceConfig]):
    """The task of training a sentence encoder; the methods are described in `jobs.engine.task.Task`.

    No model is rated, so that the last one is exported: no score tells how well the embeddings transfer.
    """

    unit = "documents"
    module: TemperatureSentenceEncoder

    def __init__(self, config: SentenceConfig, data: DataReference, rank: int, world_size: int) -> None:
        self.train, self.validation = find(data.train), Manifest.load(data.validation)
        self.source = span_source(config, self.train, seed=config.run.seed)
        super().__init__(
            config,
            self.source,
            plan=self.train.plan(seed=config.run.seed, window_size=config.data.shuffle_window),
            rank=rank,
            world_size=world_size,
            num_batches_per_task=64,
            num_batches_per_output=8,
            reader_resources=config.data.resources,
        )

    def build(self, *, is_fresh: bool) -> None:
        """Build the module with its per-document state, initialise the prototypes, and read the validation documents."""
        device = worker_device(self.config.workers)
        tokenizer = load_tokenizer(self.config.tokenizer, needs_eos=False)
        self.module = build_model(self.config, tokenizer, num_documents=self.train.num_rows, device=device)
        loss = self.module.loss
        if is_fresh and loss is not None and loss.tempnet is not None and loss.tempnet.config.projection:
            self._init_prototypes(loss.tempnet.config.num_prototypes, device)
        self.held_out = SpanSet.read(self.validation, self.config, rank=self.rank, world_size=self.world_size)

    @torch.no_grad()
    def _init_prototypes(self, count: int, device: torch.device) -> None:
        """Initialise the TempNet's prototypes from anchors of random training documents, the same on every rank."""
        rng = np.random.default_rng([self.config.run.seed, self.train.num_rows])
        ids = np.sort(rng.choice(self.train.num_rows, size=count, replace=False))
        self.module.eval()
        anchors = []
        for part in np.array_split(ids, -(-count // self.config.validation.batch_size)):
            tensors = span_tensors(read_documents(self.source, part), device)
            anchors.append(self.module.encoder(tensors["anchor_ids"][:, 0], tensors["anchor_mask"][:, 0]))
        self.module.init_prototypes(F.normalize(torch.cat(anchors), dim=-1))
        self.module.train()

    def parameter_groups(self) -> list[ParameterGroup]:
        """Return two groups: the encoder with its head and the learned scalar temperature, if any; and the TempNet."""
        loss = self.module.loss
        base = [self.module.model, loss and loss.bimodal.learned, loss and loss.bimodal.image_normaliser]
        return base_and_tempnet_groups(base, [loss and loss.tempnet], self.config.optimizer)

    def train_step(
        self, engine: DeepSpeedEngine, batch: Batch, *, step: int, num_units: int, with_statistics: bool
    ) -> StepResult:
        loss_config = self.config.temperature.loss_config
        gamma = gamma_at(loss_config, step, self.config.run.num_steps)
        output = engine(**span_tensors(batch, engine.device), gamma=gamma)
        engine.backward(output["loss"])
        engine.step()
        statistics = None
        if with_statistics:
            crowded = int(batch["is_crowded"].sum())
            statistics = SpanStatistics.of(output, loss_config, num_documents=len(batch["ids"]), num_crowded=crowded)
        return StepResult(output["loss"].detach() / self.world_size, statistics)

    def validate(
        self, engine: DeepSpeedEngine, *, with_details: bool
    ) -> tuple[dict[str, float], dict[str, Any] | None]:
        """Return span recall (how often an anchor is nearest to its own positive) and the MLM loss.

        The details are histograms of τ, and the comparison of the TempNet with constant temperatures.
        """
        scores, tau, sentences = validate(self.module, self.held_out, engine.device)
        loss = self.module.loss
        if loss is not None and loss.bimodal.learned is not None:
            scores["tau_mean"] = float(loss.bimodal.learned())
        if not with_details:
            return scores, None
        settings = self.config.temperature.loss_config
        histograms: dict[str, list[float]] = {}
        details: dict[str, Any] = {"histograms": histograms}
        if tau is not None:
            assert loss is not None
            assert sentences is not None
            for name, part in zip(("anchor", "positive"), tau, strict=True):
                histograms[name] = histogram_of(part, settings.tau_min, settings.tau_max).tolist()
            if self.rank == 0:
                num_anchors = self.config.data.num_anchors
                details["rivals"] = rivals(sentences, tau, loss.bimodal.config, num_anchors=num_anchors)
                details["judged_by"] = settings.kind.objective
        return scores, details

    def describe(self, scores: Mapping[str, float]) -> str:
        parts = []
        if "span_recall@1" in scores:
            parts.append(f"an anchor finds its positive in {scores['span_recall@1']:.2%}")
        if "mlm_loss" in scores:
            parts.append(f"MLM loss {scores['mlm_loss']:.4f}, right in {scores['mlm_accuracy']:.2%}")
        if "tau_mean" in scores:
            parts.append(f"mean τ {scores['tau_mean']:.4f}")
        return "; ".join(parts)

    def export(self) -> None:
        """Write the encoder in the format of sentence-transformers, and the TempNet."""
        if self.rank:
            return
        tokenizer = load_tokenizer(self.config.tokenizer, needs_eos=False)
        with open_export(self.config.run.export_directory) as directory:
            self.module.encoder.save_pretrained(directory, tokenizer, num_tokens=self.source.width)
            if self.module.loss is not None and self.module.loss.tempnet is not None:
                self.module.loss.tempnet.save_pretrained(directory / PAIRED_DIRECTORY)

    @property
    def sample_state(self) -> SampleState | None:
        """What the loss remembers of every document; None if it remembers nothing."""
        return None if self.module.loss is None else self.module.loss.bimodal.state


_SCALARS = ("num_ranks", "num_documents", "num_crowded", "mlm_loss")
_MEMBERS = ("anchor", "positive")


@dataclass(frozen=True, slots=True)
class SpanStatistics:
    """Statistics of a step, as sums that add up over ranks."""

    sums: Tensor
    """float64 vector: the values of `_SCALARS`, then the sums of `PairStatistics` if the contrastive loss is used."""
    config: ContrastiveLossConfig
    """The contrastive loss."""
    has_mlm: bool
    """Whether the MLM loss is used."""

    @classmethod
    def of(
        cls, output: SpanOutput, config: ContrastiveLossConfig, *, num_documents: int, num_crowded: int
    ) -> SpanStatistics:
        """Return the statistics of one rank's part of a batch.

        Documents are crowded if they are too short for their anchors to start at least 2·l_max apart.
        """
        mlm_loss = output["mlm_loss"]
        own = torch.tensor([1.0, num_documents, num_crowded, 0.0], dtype=torch.float64, device=output["loss"].device)
        if mlm_loss is not None:
            own[-1] = mlm_loss  # has the same value on every rank
        pairs = []
        if (contrastive := output["contrastive"]) is not None:
            pairs.append(PairStatistics.of(contrastive, config).sums)
        return cls(torch.cat([own, *pairs]), config, mlm_loss is not None)

    def summary(self) -> dict[str, float]:
        """Return means and shares; metrics of a loss that is not used are left out."""
        raw = dict(zip(_SCALARS, self.sums.tolist(), strict=False))
        summary = {"share_crowded": raw["num_crowded"] / raw["num_documents"]}
        if self.has_mlm:
            summary["mlm_loss"] = raw["mlm_loss"] / raw["num_ranks"]
        if len(self.sums) > len(_SCALARS):
            pairs = self.sums[len(_SCALARS) :]
            summary |= PairStatistics(pairs, self.config, _MEMBERS).summary()
        return summary


# Random seed of the spans that are scored in validation, which are the same for all runs.
_VALIDATION_SEED = 0
# Number of anchors on which predicted temperatures are compared with constants; the cost is quadratic in this number.
_MAX_PAIRS_COMPARED = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanSet:
    """This rank's part of the held-out documents, with the spans and masks that all validations use."""

    batches: list[Batch]
    """Batches of documents, as arrays."""
    num_documents: int
    """Number of documents of all ranks together."""
    num_padding: int
    """Number of documents of this rank that only pad its part; their results are dropped."""

    @classmethod
    def read(cls, manifest: Manifest, config: SentenceConfig, *, rank: int, world_size: int) -> SpanSet:
        """Read this rank's part of the first `validation.num_documents` documents (0: all)."""
        settings = config.validation
        total = min(settings.num_documents or manifest.num_rows, manifest.num_rows)
        size = -(-total // world_size)
        numbers = np.arange(rank * size, (rank + 1) * size)
        num_padding = int((numbers >= total).sum())
        source = span_source(config, manifest, seed=_VALIDATION_SEED)
        parts = np.array_split(np.minimum(numbers, total - 1), max(1, -(-size // settings.batch_size)))
        batches = [read_documents(source, part) for part in parts]
        return cls(batches=batches, num_documents=total, num_padding=num_padding)


@torch.no_grad()
def validate(
    module: TemperatureSentenceEncoder, held_out: SpanSet, device: torch.device
) -> tuple[dict[str, float], Tensor | None, Tensor | None]:
    """Score the held-out documents. All ranks must call this.

    Returns:
        The scores; τ (2, n·A) of anchors and positives, or None without a TempNet; the unit vectors (2, n·A, d) of
        anchors and positives, or None without a contrastive loss.
    """
    module.eval()
    world = module.world
    sentences: list[Tensor] = []
    sums = torch.zeros(3, dtype=torch.float64, device=device)  # masked tokens, their losses, correct predictions
    num_left = sum(len(batch["ids"]) for batch in held_out.batches) - held_out.num_padding
    for batch in held_out.batches:
        tensors = span_tensors(batch, device)
        num_anchors = tensors["anchor_ids"].shape[1]
        ids, mask = tensors["anchor_ids"].flatten(0, 1), tensors["anchor_mask"].flatten(0, 1)
        if module.mlm_weight:
            masked = tensors["masked"][tensors["masked"] < max(num_left, 0) * num_anchors * ids.shape[1]]
            anchors, logits = module.masked_tokens(ids, mask, masked)
            wanted = tensors["mlm_labels"].flatten()[masked]
            losses = F.cross_entropy(logits.float(), wanted, reduction="sum")
            sums += torch.stack([wanted.new_tensor(len(wanted)), losses, (logits.argmax(-1) == wanted).sum()])
        else:
            anchors = module.encoder(ids, mask)
        if module.loss is not None:
            embeddings = module.encoder(tensors["positive_ids"].flatten(0, 2), tensors["positive_mask"].flatten(0, 2))
            positives = embeddings.unflatten(0, (len(anchors), -1)).mean(1)
            sentences.append(F.normalize(torch.stack([anchors, positives], dim=1), dim=-1))
        num_left -= len(batch["ids"])
    module.train()
    scores: dict[str, float] = {}
    if module.mlm_weight:
        count, total, right = world.sum(sums).tolist()
        scores |= {"mlm_loss": total / max(count, 1.0), "mlm_accuracy": right / max(count, 1.0)}
    if module.loss is None:
        return scores, None, None
    gathered = world.gather(torch.cat(sentences))
    num_anchors = len(gathered) // (world.size * -(-held_out.num_documents // world.size))
    kept = gathered[: held_out.num_documents * num_anchors]  # the padding comes last, as all ranks' parts have one size
    anchors, positives = kept.unbind(1)
    found_at = recall(anchors, positives, torch.arange(len(kept), device=device))
    scores["span_recall@1"] = (found_at["text_recall@1"] + found_at["image_recall@1"]) / 2
    scores["positive_cosine"] = float((anchors * positives).sum(-1).mean())
    tau = None
    if module.loss.tempnet is not None:
        tau = torch.stack([module.loss.tempnet(part) for part in (anchors, positives)]).cpu()
        scores |= {"tau_mean": float(tau.double().mean()), "tau_std": float(tau.double().std())}
    return scores, tau, torch.stack([anchors, positives]).cpu()


def rivals(sentences: Tensor, tau: Tensor, config: ContrastiveLossConfig, *, num_anchors: int) -> dict[str, float]:
    """Compare predicted with constant temperatures on the first held-out anchors (at most 2 048) and their positives.

    `sentences` (2, n·A, d) holds unit vectors of anchors and positives, A of a document in sequence; `tau` is (2, n·A).

    Returns:
        The figures of :func:`tempnet.baselines.compare_with_constants` for the loss of
        :func:`tempnet.contrastive.losses.held_out_losses`, with the prefix `robust/` or `cross_entropy/` (the
        `objective` of the training loss), and `num_pairs`. All spans of a document form one group.
    """
    anchors, positives = sentences[:, :_MAX_PAIRS_COMPARED]
    pairs = torch.arange(len(anchors))
    # As in training, each row is compared with every vector except itself (`tempnet.contrastive.unimodal`).
    both = held_out_losses(torch.cat([anchors, positives]), torch.cat([positives, anchors]), pairs.repeat(2), config)
    figures = compare_with_constants(
        lambda temperatures: both(temperatures.expand(2, -1))[0],
        tau[:, :_MAX_PAIRS_COMPARED].flatten(),
        (pairs // num_anchors).repeat(2),
        tau_min=config.tau_min,
        tau_max=config.tau_max,
    )
    named = {f"{config.kind.objective}/{name}": value for name, value in figures.items()}
    return {"num_pairs": float(len(pairs)), **named}


def span_tensors(batch: Batch, device: torch.device) -> dict[str, Tensor]:
    """Convert a batch into the arguments of `TemperatureSentenceEncoder`, except γ."""
    tensors = {"ids": to_device(batch["ids"], device)}
    for name in ("anchor", "positive"):
        lengths = batch[f"{name}_lengths"]
        width = int(lengths.max())
        mask = np.arange(width) < lengths[..., None]
        tensors[f"{name}_ids"] = _tensor(batch[f"{name}_ids"][..., :width], device)
        tensors[f"{name}_mask"] = _tensor(mask, device)
        if name == "anchor":
            labels = batch["mlm_labels"][..., :width]
            tensors["mlm_labels"] = _tensor(labels, device)
            tensors["masked"] = _tensor(np.flatnonzero(labels != IGNORE_INDEX), device)
    return tensors


def _tensor(array: np.ndarray, device: torch.device) -> Tensor:
    return to_device(array.astype(np.int64), device)


# ---- data and module -------------------------------------------------------------------------------------------------


MIN_POSITIONS = 128
"""Positions of a new encoder, also where it is trained on shorter spans: what is longer would be cut when it is used."""


def prepare_documents(config: SentenceConfig) -> tuple[Manifest | GrowingManifest, Manifest]:
    """Return the manifests of the documents of `train` and `validation`, preparing them unless this was done before.

    The first one still grows if `data.prepare` says so and parts are missing.
    """
    tokenizer = load_tokenizer(config.tokenizer, needs_eos=False)
    layout = DocumentConfig(least_num_tokens=config.data.least_num_tokens, vocab_size=len(tokenizer))
    share = replace(layout, share=config.data.train_share, share_seed=config.run.seed)
    return (
        prepare_training_text(
            config, layout if share.share == 1.0 else share, partial(_check_training_documents, config)
        ),
        prepare_split(config, layout, "validation", partial(_check_documents, config, "validation")),
    )


def _check_training_documents(config: SentenceConfig, num_documents: int) -> None:
    """Check that the training documents are enough for the batch and the loss."""
    _check_documents(config, "train", num_documents)
    check_sizes(
        config,
        config.temperature if config.is_contrastive else None,
        num_samples=num_documents,
        num_pairs_per_batch=config.num_pairs_per_batch,
        noun="documents",
    )


def _check_documents(config: SentenceConfig, split: str, num_documents: int) -> None:
    data = config.data
    if not num_documents:
        raise ValueError(
            f"data.{split} = {getattr(data, split)!r} holds no document of {data.least_num_tokens} tokens, which spans "
            f"of data.max_length = {data.max_length} need: choose shorter spans, fewer anchors or a smaller min_num_tokens"
        )


def describe_documents(train: Manifest | GrowingManifest, validation: Manifest) -> dict[str, Any]:
    """Return the entries of a run's outcome that tell what its data hold; None while parts of the text are missing."""
    return {
        **describe_data(train, validation, noun="documents"),
        "num_documents_too_short": {"train": num_too_short(train.latest()), "validation": num_too_short(validation)},
    }


def num_too_short(manifest: Manifest | GrowingManifest) -> int | None:
    """Return the number of documents too short for spans; None if only a share is used, or while parts are missing."""
    if not isinstance(manifest, Manifest) or getattr(manifest.layout, "share", 1.0) < 1.0:
        return None
    return manifest.num_documents - manifest.num_rows


def span_source(config: SentenceConfig, manifest: Manifest | GrowingManifest, *, seed: int) -> SpanSource:
    """Return the source that draws spans from prepared documents."""
    return SpanSource(
        manifest=manifest,
        spans=config.data,
        special_tokens=SpecialTokens.of(load_tokenizer(config.tokenizer, needs_eos=False)),
        seed=seed,
        mask_share=config.data.mask_share if config.objective.mlm_weight else 0.0,
        cache_bytes=cache_for(config, manifest),
    )


def read_documents(source: SpanSource, ids: np.ndarray) -> Batch:
    """Read the spans of documents as drawn in epoch 0; `ids` number all documents from 0."""
    shards = np.searchsorted(source.first_rows, ids, side="right") - 1
    return source.read(shards, ids - source.first_rows[shards], 0)


def build_encoder(config: SentenceConfig, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """Build the encoder with its MLM head, pretrained or randomly initialised, the same on every rank."""
    with naming_field("data."):
        special = SpecialTokens.of(tokenizer)
    width = config.data.max_length + special.num_added
    model = base.build_encoder(
        config.model,
        AutoModelForMaskedLM,
        what="encoder with an MLM head",
        tokenizer=tokenizer,
        tokenizer_name=config.tokenizer,
        num_tokens=max(width, MIN_POSITIONS),
        seed=config.run.seed,
        with_checkpointing=config.workers.activation_checkpointing,
    )
    most = num_positions(model.config)
    if most is not None and width > most:
        raise ValueError(
            f"data.max_length = {config.data.max_length} with {special.num_added} special tokens is more than the "
            f"{most} positions of the encoder: choose at most {most - special.num_added}"
        )
    return model


def build_networks(config: SentenceConfig, width: int) -> dict[str, Any]:
    """Return the loss's new networks, which read embeddings of the given width, by the names that `UnimodalLoss` has."""
    return unimodal_networks(config.temperature, width) if config.is_contrastive else {}


def build_model(
    config: SentenceConfig, tokenizer: PreTrainedTokenizerFast, *, num_documents: int | None, device: torch.device
) -> TemperatureSentenceEncoder:
    """Build the module to train, with the loss's state of `num_documents` documents partitioned among the ranks.

    The number may be unknown (None) if the loss keeps no state of documents.
    """
    encoder = build_encoder(config, tokenizer)
    loss = None
    if config.is_contrastive:
        width = int(encoder.config.hidden_size)
        loss = unimodal_loss(config.temperature, width, num_samples=num_documents, device=device)
    module = TemperatureSentenceEncoder(
        encoder,
        loss,
        contrastive_weight=config.objective.contrastive_weight,
        mlm_weight=config.objective.mlm_weight,
        world=World.current(),
        autocast_dtype=autocast_dtype(config),
    )
    return module.to(device)
