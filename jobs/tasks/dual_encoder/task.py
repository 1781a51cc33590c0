"""The task of training a dual encoder and its temperatures, as the training loop runs it on a worker."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import ray.train.torch
import torch
from deepspeed import DeepSpeedEngine
from torch import Tensor

from jobs.engine.rho import ContrastiveSteering
from jobs.engine.task import ParameterGroup, StepResult
from jobs.tasks.base import BaseTask, base_and_tempnet_groups
from jobs.tasks.dual_encoder.config import ClipConfig
from jobs.tasks.dual_encoder.data import pair_source, random_pairs
from jobs.tasks.dual_encoder.export import export_encoder
from jobs.tasks.dual_encoder.models import build_model
from jobs.tasks.dual_encoder.validation import RetrievalSet, one_temperature, retrieval_scores, rivals
from pipelines.images.manifest import ImageManifest
from pipelines.stream import Batch
from tempnet.contrastive.losses import gamma_at
from tempnet.contrastive.statistics import PairStatistics
from tempnet.models.temperature_dual_encoder import TemperatureDualEncoder
from tempnet.statistics import histogram_of

_FIELDS = ("images", "input_ids", "attention_mask", "ids", "image_ids")


class ClipTask(BaseTask[ClipConfig]):
    """The task of training a dual encoder and its temperatures; the methods are described in `jobs.engine.task.Task`.

    Args:
        config: configuration of the run.
        train: manifest of the training pairs.
        validation: manifest of the validation pairs.
        given_tau: (2, N) temperatures of the images and texts of the training pairs, for the loss `sogclr_given`.
        rank: rank of this worker.
        world_size: number of workers.
    """

    unit = "pairs"
    module: TemperatureDualEncoder

    def __init__(
        self,
        config: ClipConfig,
        train: ImageManifest,
        validation: ImageManifest,
        given_tau: np.ndarray | None,
        rank: int,
        world_size: int,
    ) -> None:
        self.train, self.validation, self.given_tau = train, validation, given_tau
        self.loss_config = config.temperature.loss_config
        self.source = pair_source(config, train)
        super().__init__(
            config,
            self.source,
            plan=train.plan(seed=config.run.seed, window_size=config.data.shuffle_window),
            rank=rank,
            world_size=world_size,
            num_readers=config.data.num_readers,
            reader_resources=config.data.resources,
            # Decoded images are large and decoding is slow, so small tasks are shared among several readers.
            num_batches_per_task=8,
            num_batches_per_output=1,
        )

    def build(self, *, is_fresh: bool) -> None:
        """Build the module with its per-sample state, initialise the prototypes, and read the validation set."""
        device = ray.train.torch.get_device()
        self.module = build_model(self.config, self.source.tokenizer, num_pairs=self.train.num_pairs, device=device)
        if is_fresh and self.config.temperature.needs_tempnets and self.config.temperature.projection:
            self._init_prototypes(device)
        self.steering = ContrastiveSteering(self.config.temperature, self.module.loss, self.train.num_pairs)
        if self.given_tau is not None:
            assert self.module.loss.state is not None
            self.module.loss.state.fill("tau", torch.from_numpy(self.given_tau))
        self.retrieval = RetrievalSet.read(pair_source(self.config, self.validation), self.config)

    @torch.no_grad()
    def _init_prototypes(self, device: torch.device) -> None:
        """Initialise the TempNets' prototypes from embeddings of random training images and texts, the same on every rank."""
        count = self.config.temperature.num_prototypes
        ids = random_pairs(self.train.num_pairs, count, self.config.run.seed)
        batch = self._tensors(self.source.read(*self.source.locate(ids), 0), device)
        self.module.eval()
        encoder = self.module.encoder
        image = encoder.encode_images(batch["images"])
        text = encoder.encode_texts(batch["input_ids"], batch["attention_mask"])
        self.module.init_prototypes(image, text)
        self.module.train()

    def parameter_groups(self) -> list[ParameterGroup]:
        """Return two groups: towers, projections and the learned scalar temperature, if any; and the TempNets."""
        loss = self.module.loss
        base = [self.module.encoder, loss.learned]
        return base_and_tempnet_groups(base, [loss.image_tempnet, loss.text_tempnet], self.config.optimizer)

    def train_step(
        self, engine: DeepSpeedEngine, batch: Batch, *, step: int, num_units: int, with_statistics: bool
    ) -> StepResult:
        """Train on one global batch."""
        gamma = gamma_at(self.loss_config, step, self.config.run.num_steps)
        is_steered = self.steering.follows(engine)
        output = engine(**self._tensors(batch, engine.device), gamma=gamma)
        engine.backward(output["loss"])
        engine.step()
        if is_steered:
            self.steering.observe_pairs(output)
        statistics = PairStatistics.of(output, self.loss_config) if with_statistics else None
        return StepResult(output["loss"].detach() / self.world_size, statistics)

    def validate(
        self, engine: DeepSpeedEngine, *, with_details: bool
    ) -> tuple[dict[str, float], dict[str, Any] | None]:
        """Return recalls and cross-entropy; the details are histograms of τ and a comparison with constant temperatures."""
        image, text = self.retrieval.embeddings(self.module.encoder, self.module.loss.world, engine.device)
        predicted = None
        if self.module.loss.image_tempnet is not None:
            tau_image, tau_text = self.module.predict_temperatures(image.to(engine.device), text.to(engine.device))
            predicted = (tau_image.cpu(), tau_text.cpu())
        scores = self._temperature_scores(predicted)
        tau = predicted or one_temperature(self.loss_config, scores)
        scores |= retrieval_scores(image, text, self.retrieval.image_of_text, tau) | self.steering.scores()
        if not with_details:
            return scores, None
        details: dict[str, Any] = {"histograms": self._histograms(predicted)}
        if predicted and self.rank == 0:
            loss = self.module.loss.config
            details["rivals"] = rivals(image, text, self.retrieval.image_of_text, predicted, loss)
            details["judged_by"] = loss.kind.objective
        return scores, details

    def _temperature_scores(self, predicted: tuple[Tensor, Tensor] | None) -> dict[str, float]:
        """Return mean and standard deviation of τ. All ranks must call this.

        They are taken over the temperatures predicted for the validation set, or over those stored for all training
        samples. For a single learned temperature only the mean is returned, which is its value.
        """
        loss = self.module.loss
        if loss.learned is not None:
            return {"tau_mean": float(loss.learned())}
        if predicted is not None:
            both = torch.cat([part.double() for part in predicted])
            return {"tau_mean": float(both.mean()), "tau_std": float(both.std())}
        if loss.state is None or "tau" not in loss.state.columns:
            return {}
        tau = loss.state.columns["tau"].double()
        count, total, squares = loss.world.sum(
            torch.stack([tau.new_tensor(tau.numel()), tau.sum(), tau.square().sum()])
        ).tolist()
        return {"tau_mean": total / count, "tau_std": max(squares / count - (total / count) ** 2, 0.0) ** 0.5}

    def _histograms(self, tau: tuple[Tensor, Tensor] | None) -> dict[str, list[float]]:
        """Return histograms (counts) of τ by modality. All ranks must call this.

        They cover the validation set if TempNets predict τ, or all training samples if the state holds their
        temperatures; otherwise there are none.
        """
        loss = self.module.loss
        if tau is None and loss.state is not None and "tau" in loss.state.columns:
            counts = torch.stack([histogram_of(part, *self._tau_range()) for part in loss.state.columns["tau"]])
            counts = loss.world.sum(counts.double())
        elif tau is not None:
            counts = torch.stack([histogram_of(part, *self._tau_range()) for part in tau])
        else:
            return {}
        return {name: part.tolist() for name, part in zip(("image", "text"), counts, strict=True)}

    def _tau_range(self) -> tuple[float, float]:
        return self.loss_config.tau_min, self.loss_config.tau_max

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
        """Write dual encoder, tokenizer and TempNets."""
        if self.rank == 0:
            export_encoder(self.module, self.source.tokenizer, self.config.run.export_directory)

    def save(self, directory: Path) -> None:
        """Save the loss's state of this rank's samples, and ρ if it is adjusted during training."""
        self.steering.save(directory)
        if self.module.loss.state is not None:
            self.module.loss.state.save(directory)

    def load(self, directory: Path, num_writers: int) -> None:
        """Load the loss's state of this rank's samples, whichever ranks saved it, and ρ."""
        self.steering.load(directory)
        if self.module.loss.state is not None:
            self.module.loss.state.load(directory, num_writers)

    @staticmethod
    def _tensors(batch: Batch, device: torch.device) -> dict[str, Tensor]:
        return {name: torch.from_numpy(np.ascontiguousarray(batch[name])).to(device) for name in _FIELDS}
