"""The task of training a dual encoder and its temperatures, as the training loop runs it on a worker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from deepspeed import DeepSpeedEngine
from torch import Tensor

from jobs.engine.hardware import worker_device
from jobs.engine.rho import ContrastiveSteering
from jobs.engine.task import ParameterGroup, StepResult
from jobs.tasks.base import BaseTask, base_and_tempnet_groups
from jobs.tasks.dual_encoder.config import ClipConfig
from jobs.tasks.dual_encoder.data import pair_source, random_pairs
from jobs.tasks.dual_encoder.export import export_encoder
from jobs.tasks.dual_encoder.models import build_encoder, build_model
from jobs.tasks.dual_encoder.scores import MAX_PAIRS_COMPARED, rivals, score
from jobs.tasks.dual_encoder.validation import HeldOut, HeldOutSet, RetrievalSet, StoredSet
from jobs.tasks.frozen_base import check_checkpoint
from jobs.tasks.node_cache import GIB
from pipelines.features import EmbeddingSource, PairEmbeddings
from pipelines.images.manifest import ImageManifest
from pipelines.images.pairs import PairSource
from pipelines.object_store import is_local
from pipelines.storage import resolve
from pipelines.stream import Batch
from pipelines.text.tokenization import load_tokenizer
from tempnet.base_model import BaseReference
from tempnet.contrastive.config import gamma_at
from tempnet.contrastive.losses import PairStatistics
from tempnet.models.dual_encoder import DualEncoder
from tempnet.models.temperature_dual_encoder import TemperatureDualEncoder

_FIELDS = ("images", "input_ids", "attention_mask", "image_embeddings", "text_embeddings", "ids", "image_ids")


@dataclass(frozen=True, slots=True, kw_only=True)
class PairData:
    """The data of a task."""

    train: ImageManifest
    """Manifest of the training pairs."""
    validation: ImageManifest
    """Manifest of the validation pairs."""
    given_tau: np.ndarray | None
    """(2, N) temperatures of the images and texts of the training pairs, for the loss `sogclr_given`."""
    towers: BaseReference | None
    """Reference to the frozen towers; None if the towers are trained."""
    embeddings: tuple[PairEmbeddings, PairEmbeddings] | None
    """The stored embeddings of training and validation pairs; None if the towers compute them."""


class ClipTask(BaseTask[ClipConfig]):
    """The task of training a dual encoder and its temperatures; the methods are described in `jobs.engine.task.Task`.

    Args:
        config: configuration of the run.
        data: the data.
        rank: rank of this worker.
        world_size: number of workers.
    """

    unit = "pairs"
    module: TemperatureDualEncoder

    def __init__(self, config: ClipConfig, data: PairData, rank: int, world_size: int) -> None:
        self.data = data
        self.source: PairSource | EmbeddingSource
        reading: dict[str, Any]
        if data.embeddings is None:
            self.source = pair_source(config, data.train)
            # Decoded images are large and decoding is slow, so small tasks are shared among several readers.
            reading = {"num_readers": config.data.num_readers, "num_batches_per_task": 8, "num_batches_per_output": 1}
        else:
            self.source = EmbeddingSource(embeddings=data.embeddings[0], cache_bytes=round(config.data.cache_gib * GIB))
            # Local files are memory-mapped, and a copy through Ray's object store would cost more than reading them.
            reading = {"num_readers": 0 if is_local(resolve(data.embeddings[0].directory)[0]) else 1}
        super().__init__(
            config,
            self.source,
            plan=data.train.plan(seed=config.run.seed, window_size=config.data.shuffle_window),
            rank=rank,
            world_size=world_size,
            reader_resources=config.data.resources,
            **reading,
        )
        self._frozen_held_out: HeldOut | None = None
        self._exported_towers: DualEncoder | None = None

    def build(self, *, is_fresh: bool) -> None:
        """Build the module with its per-sample state, initialise the prototypes, and find the validation set."""
        device = worker_device(self.config.workers)
        num_pairs = self.data.train.num_pairs
        tokenizer = load_tokenizer(self.config.tokenizer, needs_eos=False)
        self.module = build_model(self.config, tokenizer, num_pairs=num_pairs, device=device)
        if is_fresh and self.config.temperature.needs_tempnets and self.config.temperature.projection:
            self.init_prototypes(self.module, self.config, device)
        self.steering = ContrastiveSteering(self.config.temperature, self.module.loss, num_pairs)
        if self.data.given_tau is not None:
            assert self.module.loss.state is not None
            self.module.loss.state.fill("tau", torch.from_numpy(self.data.given_tau))
        self.retrieval = self.find_held_out()

    def find_held_out(self) -> HeldOutSet:
        """Return the validation set."""
        if self.data.embeddings is not None:
            return StoredSet(stored=self.data.embeddings[1], num_images=self.config.validation.num_images)
        return RetrievalSet.read(pair_source(self.config, self.data.validation), self.config)

    @torch.no_grad()
    def init_prototypes(self, module: TemperatureDualEncoder, config: ClipConfig, device: torch.device) -> None:
        """Initialise the TempNets' prototypes from embeddings of random training images and texts, the same on every rank."""
        ids = random_pairs(self.data.train.num_pairs, config.temperature.num_prototypes, config.run.seed)
        tensors = tensors_of(self.source.read(*self.source.locate(ids), 0), device)
        module.eval()
        module.init_prototypes(*module.embed(**inputs_of(tensors)))
        module.train()

    def parameter_groups(self) -> list[ParameterGroup]:
        """Return two groups: towers, projections and the learned scalar temperature, if any; and the TempNets."""
        loss = self.module.loss
        base = [self.module.encoder, loss.learned]
        return base_and_tempnet_groups(base, [loss.image_tempnet, loss.text_tempnet], self.config.optimizer)

    def train_step(
        self, engine: DeepSpeedEngine, batch: Batch, *, step: int, num_units: int, with_statistics: bool
    ) -> StepResult:
        """Train on one global batch."""
        config = self.config.temperature.loss_config
        is_steered = self.steering.follows(engine.optimizer)
        output = engine(**tensors_of(batch, engine.device), gamma=gamma_at(config, step, self.config.run.num_steps))
        engine.backward(output["loss"])
        engine.step()
        if is_steered:
            self.steering.observe_pairs(output)
        statistics = PairStatistics.of(output, config) if with_statistics else None
        return StepResult(output["loss"].detach() / self.world_size, statistics)

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
        number = min(self.data.train.num_pairs, MAX_PAIRS_COMPARED)
        ids = random_pairs(self.data.train.num_pairs, number, self.config.run.seed)
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
        if self._frozen_held_out is not None:
            return self._frozen_held_out
        held_out = self.retrieval.embeddings(module.encoder, module.loss.world, device)
        if self.config.model.freeze:
            self._frozen_held_out = held_out
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
        self.export_to(self.config.run.export_directory, self.module)

    def export_to(self, uri: str, module: TemperatureDualEncoder) -> None:
        """Write the export of a module to the directory at `uri`, if this is the first rank."""
        if self.rank != 0:
            return
        tokenizer = load_tokenizer(self.config.tokenizer, needs_eos=False)
        self._exported_towers = module.encoder or self._exported_towers or build_encoder(self.config, tokenizer)
        export_encoder(self._exported_towers, module.loss, tokenizer, uri)

    def save(self, directory: Path) -> None:
        """Save the loss's state of this rank's samples, ρ if it is adjusted, and the name of frozen towers."""
        self.steering.save(directory)
        if self.module.loss.state is not None:
            self.module.loss.state.save(directory)
        if self.data.towers is not None and self.rank == 0:
            self.data.towers.save(directory)

    def load(self, directory: Path, num_writers: int) -> None:
        """Load the loss's state of this rank's samples, whichever ranks saved it, and ρ.

        Raises:
            FatalTrainingError: if the checkpoint was written on other frozen towers.
        """
        check_checkpoint(directory, self.data.towers)
        self.steering.load(directory)
        if self.module.loss.state is not None:
            self.module.loss.state.load(directory, num_writers)


def tensors_of(batch: Batch, device: torch.device) -> dict[str, Tensor]:
    """Return the arrays of a batch that the module reads as tensors."""
    return {name: torch.from_numpy(np.ascontiguousarray(batch[name])).to(device) for name in _FIELDS if name in batch}


def inputs_of(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return those of the tensors of a batch that become embeddings, or are (`TemperatureDualEncoder.embed`)."""
    return {name: value for name, value in tensors.items() if name not in ("ids", "image_ids")}
