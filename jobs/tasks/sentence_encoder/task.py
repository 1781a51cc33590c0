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
from jobs.tasks import base
from jobs.tasks.base import (
    DataReference,
    UnimodalTask,
    autocast_dtype,
    draw_samples,
    encode_all,
    naming_field,
    order_of,
    to_device,
    unimodal_loss,
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
from tempnet.contrastive.config import ContrastiveLossConfig
from tempnet.contrastive.losses import PairStatistics, held_out_losses
from tempnet.contrastive.retrieval import recall
from tempnet.contrastive.state import World
from tempnet.models.sentence_encoder import IGNORE_INDEX, SpanOutput, TemperatureSentenceEncoder, num_positions
from tempnet.network import TempNet
from tempnet.statistics import histogram_of

if TYPE_CHECKING:  # the driver, which builds the model to check it, does not need DeepSpeed
    from deepspeed import DeepSpeedEngine


class SentenceTask(UnimodalTask[SentenceConfig]):
    """The task of training a sentence encoder; the methods are described in `jobs.engine.task.Task`.

    No model is rated, so that the last one is exported: no score tells how well the embeddings transfer.
    """

    unit = "documents"
    module: TemperatureSentenceEncoder

    def __init__(self, config: SentenceConfig, data: DataReference, rank: int, world_size: int) -> None:
        self.train, self.validation = find(data.train), Manifest.load(data.validation)
        self.source = span_source(config, self.train, seed=config.run.seed)
        reading = {**order_of(config, self.train), "num_batches_per_task": 64, "num_batches_per_output": 8}
        super().__init__(config, self.source, rank=rank, world_size=world_size, **reading)

    def build(self, *, is_fresh: bool) -> None:
        """Build the module with its per-document state, initialise the prototypes, and find the validation documents."""
        device = worker_device(self.config.workers)
        tokenizer = load_tokenizer(self.config.tokenizer, needs_eos=False)
        self.module = build_model(self.config, tokenizer, num_documents=self.train.num_rows, device=device)
        loss = self.module.loss
        if is_fresh and loss is not None and loss.tempnet is not None and loss.tempnet.config.projection:
            self._init_prototypes(loss.tempnet, device)
        self.held_out = span_source(self.config, self.validation, seed=_VALIDATION_SEED)

    @torch.no_grad()
    def _init_prototypes(self, network: TempNet, device: torch.device) -> None:
        """Initialise the TempNet's prototypes from anchors of random training documents, the same on every rank."""

        def encode(ids: np.ndarray) -> Tensor:
            tensors = span_tensors(read_documents(self.source, ids), device)
            return self.module.encoder(tensors["anchor_ids"][:, 0], tensors["anchor_mask"][:, 0])

        ids = draw_samples(self.train.num_rows, network.config.num_prototypes, self.config.run.seed)
        self.module.eval()
        anchors = encode_all(encode, ids, self.module.world, self.config.validation.batch_size)
        network.init_prototypes(F.normalize(anchors, dim=-1))
        self.module.train()

    def inputs(self, batch: Batch, device: torch.device) -> dict[str, Tensor]:
        return span_tensors(batch, device)

    def statistics(self, output: Any, batch: Batch) -> SpanStatistics:
        config, crowded = self.config.temperature.loss_config, int(batch["is_crowded"].sum())
        return SpanStatistics.of(output, config, num_documents=len(batch["ids"]), num_crowded=crowded)

    def validate(
        self, engine: DeepSpeedEngine, *, with_details: bool
    ) -> tuple[dict[str, float], dict[str, Any] | None]:
        """Return span recall (how often an anchor is nearest to its own positive) and the MLM loss.

        The details are histograms of τ, and the comparison of the TempNet with constant temperatures.
        """
        module, settings = self.module, self.config.validation
        total = min(settings.num_documents or self.validation.num_rows, self.validation.num_rows)

        def encode(ids: np.ndarray) -> Tensor:
            return encode_spans(module, span_tensors(read_documents(self.held_out, ids), engine.device))

        found = encode_all(encode, np.arange(total), module.world, settings.batch_size)
        scores: dict[str, float] = {}
        if module.mlm_weight:
            count, losses, right = found[:, :3].double().sum(0).tolist()
            scores |= {"mlm_loss": losses / max(count, 1.0), "mlm_accuracy": right / max(count, 1.0)}
        histograms: dict[str, list[float]] = {}
        details: dict[str, Any] = {"histograms": histograms}
        if module.loss is not None:
            anchors, positives = sentences = found[:, 3:].reshape(-1, 2, module.encoder.embedding_size).unbind(1)
            found_at = recall(anchors, positives, torch.arange(len(anchors), device=engine.device))
            scores["span_recall@1"] = (found_at["text_recall@1"] + found_at["image_recall@1"]) / 2
            scores["positive_cosine"] = float((anchors * positives).sum(-1).mean())
            tempnet, config = module.loss.tempnet, module.loss.bimodal.config
            tau = None if tempnet is None else torch.stack([tempnet(part) for part in sentences]).cpu()
            scores |= self.tau_scores(tau)
            if tau is not None and with_details:
                for name, part in zip(("anchor", "positive"), tau, strict=True):
                    histograms[name] = histogram_of(part, config.tau_min, config.tau_max).tolist()
                if self.rank == 0:
                    both, num_anchors = torch.stack(sentences).cpu(), self.config.data.num_anchors
                    details["rivals"] = rivals(both, tau, config, num_anchors=num_anchors)
                    details["judged_by"] = config.kind.objective
        return scores, details if with_details else None

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
            self.save_tempnet(directory)


_SCALARS = ("num_ranks", "num_documents", "num_crowded", "mlm_loss")


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
        mlm_loss, contrastive = output["mlm_loss"], output["contrastive"]
        sums = torch.tensor([1.0, num_documents, num_crowded, 0.0], dtype=torch.float64, device=output["loss"].device)
        if mlm_loss is not None:
            sums[-1] = mlm_loss  # has the same value on every rank
        if contrastive is not None:
            sums = torch.cat([sums, PairStatistics.of(contrastive, config).sums])
        return cls(sums, config, mlm_loss is not None)

    def summary(self) -> dict[str, float]:
        """Return means and shares; metrics of a loss that is not used are left out."""
        raw = dict(zip(_SCALARS, self.sums.tolist(), strict=False))
        summary = {"share_crowded": raw["num_crowded"] / raw["num_documents"]}
        if self.has_mlm:
            summary["mlm_loss"] = raw["mlm_loss"] / raw["num_ranks"]
        if len(pairs := self.sums[len(_SCALARS) :]):
            summary |= PairStatistics(pairs, self.config, ("anchor", "positive")).summary()
        return summary


# Random seed of the spans that are scored in validation, which are the same for all runs.
_VALIDATION_SEED = 0
# Number of anchors on which predicted temperatures are compared with constants; the cost is quadratic in this number.
_MAX_PAIRS_COMPARED = 2048


def encode_spans(module: TemperatureSentenceEncoder, tensors: Mapping[str, Tensor]) -> Tensor:
    """Return what is scored of n held-out documents with A anchors each: (n, 3 + A·2·d).

    These are number, losses and correct predictions of a document's masked tokens, 0 without MLM, and, with a contrastive
    loss, the unit vectors of its anchors and their positives.
    """
    ids, mask = tensors["anchor_ids"].flatten(0, 1), tensors["anchor_mask"].flatten(0, 1)
    number, masked = len(tensors["ids"]), tensors["masked"]
    sums = torch.zeros(number, 3, device=ids.device)
    if module.mlm_weight:
        anchors, logits = module.masked_tokens(ids, mask, masked)
        wanted = tensors["mlm_labels"].flatten()[masked]
        losses = F.cross_entropy(logits.float(), wanted, reduction="none")
        figures = torch.stack([torch.ones_like(losses), losses, (logits.argmax(-1) == wanted).float()], dim=1)
        sums.index_add_(0, masked // (ids.numel() // number), figures)
    else:
        anchors = module.encoder(ids, mask)
    if module.loss is None:
        return sums
    positives = module.encoder(tensors["positive_ids"].flatten(0, 2), tensors["positive_mask"].flatten(0, 2))
    positives = positives.unflatten(0, (len(anchors), -1)).mean(1)
    sentences = F.normalize(torch.stack([anchors, positives], dim=1), dim=-1)
    return torch.cat([sums, sentences.reshape(number, -1)], dim=1)


def rivals(sentences: Tensor, tau: Tensor, config: ContrastiveLossConfig, *, num_anchors: int) -> dict[str, float]:
    """Compare predicted with constant temperatures on the first held-out anchors (at most 2 048) and their positives.

    `sentences` (2, n·A, d) holds unit vectors of anchors and positives, A of a document in sequence; `tau` is (2, n·A).
    Returned are `num_pairs` and, as `<objective>/…`, the figures of :func:`tempnet.baselines.compare_with_constants` for
    :func:`tempnet.contrastive.losses.held_out_losses`, where all spans of a document form one group.
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
    return {"num_pairs": float(len(pairs))} | {
        f"{config.kind.objective}/{key}": value for key, value in figures.items()
    }


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
    """Return the manifests of the documents of `train`, which may still grow, and `validation`, preparing them if need be."""
    tokenizer = load_tokenizer(config.tokenizer, needs_eos=False)
    layout = DocumentConfig(least_num_tokens=config.data.least_num_tokens, vocab_size=len(tokenizer))
    of_train = layout
    if config.data.train_share < 1.0:
        of_train = replace(layout, share=config.data.train_share, share_seed=config.run.seed)
    train = prepare_training_text(config, of_train, partial(_check_training_documents, config))
    return train, prepare_split(config, layout, "validation", partial(_check_documents, config, "validation"))


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
    too_short = {"train": num_too_short(train.latest()), "validation": num_too_short(validation)}
    return {**describe_data(train, validation, noun="documents"), "num_documents_too_short": too_short}


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
    what, num_tokens = "encoder with an MLM head", max(width, MIN_POSITIONS)
    model = base.build_encoder(config, AutoModelForMaskedLM, tokenizer, what=what, num_tokens=num_tokens)
    most = num_positions(model.config)
    if most is not None and width > most:
        raise ValueError(
            f"data.max_length = {config.data.max_length} with {special.num_added} special tokens is more than the "
            f"{most} positions of the encoder: choose at most {most - special.num_added}"
        )
    return model


def build_model(
    config: SentenceConfig, tokenizer: PreTrainedTokenizerFast, *, num_documents: int | None, device: torch.device
) -> TemperatureSentenceEncoder:
    """Build the module to train, with the state of the documents divided among the ranks; None: the loss keeps no state."""
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
