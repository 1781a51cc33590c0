"""The task of training a dual encoder and its temperatures, as the loop runs it on a worker, alone or with others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from jobs.engine.export import open_export
from jobs.engine.hardware import worker_device
from jobs.engine.task import ParameterGroup, StepResult, Task
from jobs.tasks.base import (
    GIB,
    ContrastiveSteering,
    DataReference,
    base_and_tempnet_groups,
    num_stored_readers,
    to_device,
)
from jobs.tasks.dual_encoder.config import ClipConfig
from jobs.tasks.dual_encoder.data import add_loss, build_encoder, pair_source
from jobs.tasks.dual_encoder.validation import MAX_PAIRS_COMPARED, HeldOut, RetrievalSet, rivals, score
from jobs.tasks.images import random_pairs
from pipelines.features import EmbeddingSource, PairEmbeddings
from pipelines.images.manifest import ImageManifest
from pipelines.images.pairs import PairSource
from pipelines.stream import Batch
from pipelines.text.tokenization import load_tokenizer
from tempnet.contrastive.config import gamma_at
from tempnet.contrastive.losses import ContrastiveLoss, PairStatistics
from tempnet.contrastive.state import SampleState
from tempnet.models.dual_encoder import (
    IMAGE_TEMPNET_DIRECTORY,
    TEXT_TEMPNET_DIRECTORY,
    DualEncoder,
    SideBySideDualEncoder,
    TemperatureDualEncoder,
    save_training_temperature,
)

_FIELDS = ("images", "input_ids", "attention_mask", "image_embeddings", "text_embeddings", "ids", "image_ids")


class ClipTask(Task[ClipConfig]):
    """The task of training a dual encoder and its temperatures; the methods are described in `jobs.engine.task.Task`."""

    unit = "pairs"
    module: Any
    """A `TemperatureDualEncoder`; of several runs that train together a `SideBySideDualEncoder`, whose parts the members
    have."""
    steering: ContrastiveSteering

    def __init__(self, config: ClipConfig, data: DataReference, rank: int, world_size: int) -> None:
        self.data, self.base = data, data.base
        self.train, self.held_out_pairs = ImageManifest.load(data.train), ImageManifest.load(data.validation)
        self.source: PairSource | EmbeddingSource
        reading: dict[str, Any]
        if data.features is None:
            self.source = pair_source(config, self.train)
            # Decoded images are large and decoding is slow, so small tasks are shared among several readers.
            reading = {"num_readers": config.data.num_readers, "num_batches_per_task": 8, "num_batches_per_output": 1}
        else:
            embeddings = PairEmbeddings.load(data.features[0], self.train)
            self.source = EmbeddingSource(embeddings=embeddings, cache_bytes=round(config.data.cache_gib * GIB))
            reading = {"num_readers": num_stored_readers(embeddings.directory)}
        super().__init__(
            config,
            self.source,
            plan=self.train.plan(seed=config.run.seed, window_size=config.data.shuffle_window),
            rank=rank,
            world_size=world_size,
            reader_resources=config.data.resources,
            **reading,
        )
        self._shared: dict[str, Any] = {}
        """What any member has found for all: the embeddings of the validation set, and towers to export."""

    def build(self, *, is_fresh: bool) -> None:
        """Build the module with its per-sample state, initialise the prototypes, and find the validation set."""
        self._find_held_out()
        towers = self._build_towers()
        for member in self.make_members():
            member._build_on(towers, is_fresh=is_fresh)
        if len(self.members) > 1:
            self.module = SideBySideDualEncoder([member.module for member in self.members])

    def _build_on(self, towers: DualEncoder | None, *, is_fresh: bool) -> None:
        """Build the module of this run on its towers."""
        device = worker_device(self.config.workers)
        self.module = add_loss(towers, self.config, num_pairs=self.train.num_pairs, device=device)
        if is_fresh:
            self._init_prototypes(device)
        self.steering = ContrastiveSteering(self.config.temperature, self.module.loss, self.train.num_pairs)
        if self.data.given_tau is not None:
            self.module.loss.state.fill("tau", torch.from_numpy(self.data.given_tau))

    def _build_towers(self) -> DualEncoder | None:
        """Return the towers; None with stored embeddings."""
        if self.data.features is not None:
            return None
        return build_encoder(self.config, load_tokenizer(self.config.tokenizer, needs_eos=False))

    def _find_held_out(self) -> None:
        """Read the stored embeddings of the validation set, or its captions."""
        if self.data.features is None:
            self.retrieval = RetrievalSet(pair_source(self.config, self.held_out_pairs), self.config)
            return
        total = self.held_out_pairs.num_images
        number = min(self.config.validation.num_images or total, total)
        image, text, owner = PairEmbeddings.load(self.data.features[1], self.held_out_pairs).read_held_out(number)
        self._shared["held_out"] = HeldOut(
            image=torch.from_numpy(image), text=torch.from_numpy(text), image_of_text=owner
        )

    @torch.no_grad()
    def _init_prototypes(self, device: torch.device) -> None:
        """Initialise the networks' prototypes from embeddings of random training images and texts, the same on every rank."""
        module, settings = self.module, self.config.temperature
        if not settings.needs_prototypes:
            return
        ids = random_pairs(self.train.num_pairs, settings.num_prototypes, self.config.run.seed)
        tensors = tensors_of(self.source.read(*self.source.locate(ids), 0), device)
        module.eval()
        module.init_prototypes(*module.embed(**inputs_of(tensors)))
        module.train()

    @property
    def sample_state(self) -> SampleState | None:
        """What the loss remembers of every sample; None if it remembers nothing."""
        return self.module.loss.state

    def parameter_groups(self) -> list[ParameterGroup]:
        """Return two groups: towers, projections and the learned scalars, if any; and the TempNets.

        Networks that predict normalisers have to follow the towers, so that they learn at the towers' rate; beside frozen
        towers they belong to the TempNets.
        """
        loss = self.module.loss
        base: list[nn.Module | None] = [self.module.encoder, loss.learned]
        tempnets: list[nn.Module | None] = [loss.image_tempnet, loss.text_tempnet]
        (tempnets if self.config.model.freeze else base).extend([loss.image_normaliser, loss.text_normaliser])
        return base_and_tempnet_groups(base, tempnets, self.config.optimizer)

    def train_step(
        self, engine: DeepSpeedEngine, batch: Batch, *, step: int, num_units: int, with_statistics: bool
    ) -> StepResult:
        """Train on one global batch."""
        configs = [member.config.temperature.loss_config for member in self.members]
        gammas = [gamma_at(config, step, self.config.run.num_steps) for config in configs]
        are_steered = [member.steering.follows(engine.optimizer, member.number) for member in self.members]
        tensors = tensors_of(batch, engine.device)
        outputs = engine(**tensors, gammas=gammas) if len(gammas) > 1 else [engine(**tensors, gamma=gammas[0])]
        losses = [output["loss"] for output in outputs]
        engine.backward(sum(losses[1:], losses[0]))
        engine.step()
        for member, is_steered, output in zip(self.members, are_steered, outputs, strict=True):
            if is_steered:
                member.steering.observe_pairs(output)
        statistics: Any = None
        if with_statistics:
            statistics = [PairStatistics.of(output, config) for output, config in zip(outputs, configs, strict=True)]
        return StepResult(torch.stack(losses).detach().squeeze() / self.world_size, statistics)

    def validate(
        self, engine: DeepSpeedEngine, *, with_details: bool
    ) -> tuple[dict[str, float], dict[str, Any] | None]:
        """Return recalls and cross-entropy; the details are histograms of τ and a comparison with constant temperatures."""
        held_out = self.held_out(self.module, engine.device)
        scores, details = score(self.module, held_out, engine.device, with_details=with_details)
        if details is not None and self.module.loss.config.kind.temperature == "per_sample":
            details |= self._judge_stored_temperatures(engine.device)
        return scores | self.steering.scores(), details

    def _judge_stored_temperatures(self, device: torch.device) -> dict[str, Any]:
        """Compare the temperatures of training pairs with constants on random ones of these pairs. All ranks must call this.

        They belong to these pairs and say nothing of others, so that no held-out pair could judge them.
        """
        number = min(self.train.num_pairs, MAX_PAIRS_COMPARED)
        ids = random_pairs(self.train.num_pairs, number, self.config.run.seed)
        parts = []
        for at in range(0, number, self.config.validation.batch_size):
            chosen = ids[at : at + self.config.validation.batch_size]
            tensors = tensors_of(self.source.read(*self.source.locate(chosen), 0), device)
            parts.append((*self.module.embed(**inputs_of(tensors)), tensors["ids"], tensors["image_ids"]))
        image, text, kept, owner = (torch.cat(part) for part in zip(*parts, strict=True))
        loss = self.module.loss
        assert loss.state is not None
        tau = loss.state.read(kept)["tau"]
        if self.rank != 0:
            return {}
        return {
            "rivals": rivals(image.cpu(), text.cpu(), owner.cpu(), tau.cpu(), loss.config),
            "judged_by": loss.config.kind.objective,
            "judged_on": "training",
        }

    def held_out(self, module: TemperatureDualEncoder, device: torch.device) -> HeldOut:
        """Return the embeddings of the validation set; those of frozen towers are computed once."""
        held_out: HeldOut | None = self._shared.get("held_out")
        if held_out is not None:
            return held_out
        assert module.encoder is not None
        held_out = self.retrieval.embeddings(module.encoder, module.loss.world, device)
        if self.config.model.freeze:
            self._shared["held_out"] = held_out
        return held_out

    def describe(self, scores: Mapping[str, float]) -> str:
        """Format cross-entropy, recalls and mean τ as a short text for a progress line."""
        tau = f"; mean τ {scores['tau_mean']:.4f}" if "tau_mean" in scores else ""
        return (
            f"cross-entropy {scores['cross_entropy_tau']:.4f}; "
            f"mean recall {scores['mean_recall']:.2%} (R@1 image → text {scores['text_recall@1']:.2%}, "
            f"text → image {scores['image_recall@1']:.2%}){tau}"
        )

    def rating(self, scores: Mapping[str, float]) -> float | None:
        """Return the mean recall; None with a frozen encoder, so that the last model is exported (recall is constant)."""
        return None if self.config.model.freeze else scores["mean_recall"]

    def export(self) -> None:
        """Write dual encoder, tokenizer and TempNets; towers whose embeddings were stored are loaded for this."""
        if self.rank == 0:
            tokenizer = load_tokenizer(self.config.tokenizer, needs_eos=False)
            towers = self.module.encoder or self._shared.get("towers") or build_encoder(self.config, tokenizer)
            self._shared["towers"] = towers
            export_encoder(towers, self.module.loss, tokenizer, self.config.run.export_directory)


def export_encoder(encoder: DualEncoder, loss: ContrastiveLoss, tokenizer: PreTrainedTokenizerFast, uri: str) -> None:
    """Write dual encoder, tokenizer and the loss's TempNets or constant τ into `uri`, overwriting an earlier export.

    The towers load with Transformers alone.
    """
    with open_export(uri) as directory:
        encoder.save_pretrained(directory, tokenizer)
        if (tau := loss.constant_tau) is not None:
            save_training_temperature(directory, tau)
        for network, name in (
            (loss.image_tempnet, IMAGE_TEMPNET_DIRECTORY),
            (loss.text_tempnet, TEXT_TEMPNET_DIRECTORY),
        ):
            if network is not None:
                network.save_pretrained(directory / name)


def tensors_of(batch: Batch, device: torch.device) -> dict[str, Tensor]:
    """Return the arrays of a batch that the module reads as tensors."""
    return {name: to_device(batch[name], device) for name in _FIELDS if name in batch}


def inputs_of(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return those of the tensors of a batch that become embeddings, or are (`TemperatureDualEncoder.embed`)."""
    return {name: value for name, value in tensors.items() if name not in ("ids", "image_ids")}
