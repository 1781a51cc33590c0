"""The task of training a sentence encoder, as the training loop runs it on a worker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from deepspeed import DeepSpeedEngine
from torch import Tensor

from jobs.engine.export import open_export
from jobs.engine.hardware import worker_device
from jobs.engine.task import ParameterGroup, StepResult
from jobs.tasks.base import BaseTask, base_and_tempnet_groups
from jobs.tasks.sentence_encoder.config import SentenceConfig
from jobs.tasks.sentence_encoder.data import read_documents, span_source
from jobs.tasks.sentence_encoder.models import build_model
from jobs.tasks.sentence_encoder.validation import SpanSet, rivals, span_tensors, validate
from pipelines.stream import Batch
from pipelines.text.growing import GrowingManifest
from pipelines.text.manifest import Manifest
from pipelines.text.tokenization import load_tokenizer
from tempnet.contrastive.config import ContrastiveLossConfig, gamma_at
from tempnet.contrastive.losses import PairStatistics
from tempnet.models.temperature_sentence_encoder import SpanOutput, TemperatureSentenceEncoder
from tempnet.network import PAIRED_DIRECTORY
from tempnet.statistics import histogram_of


class SentenceTask(BaseTask[SentenceConfig]):
    """The task of training a sentence encoder; the methods are described in `jobs.engine.task.Task`.

    No model is rated, so that the last one is exported: no score tells how well the embeddings transfer.
    """

    unit = "documents"
    module: TemperatureSentenceEncoder

    def __init__(
        self,
        config: SentenceConfig,
        train: Manifest | GrowingManifest,
        validation: Manifest,
        rank: int,
        world_size: int,
    ) -> None:
        self.train, self.validation = train, validation
        self.source = span_source(config, train, seed=config.run.seed)
        super().__init__(
            config,
            self.source,
            plan=train.plan(seed=config.run.seed, window_size=config.data.shuffle_window),
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
        assert isinstance(self.train, Manifest)  # `make_plan` refuses the other case.
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
        base = [self.module.model, loss and loss.bimodal.learned]
        return base_and_tempnet_groups(base, [loss and loss.tempnet], self.config.optimizer)

    def train_step(
        self, engine: DeepSpeedEngine, batch: Batch, *, step: int, num_units: int, with_statistics: bool
    ) -> StepResult:
        """Train on one global batch."""
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
        """Format scores as a short text for a progress line."""
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

    def save(self, directory: Path) -> None:
        """Save the loss's state of this rank's documents."""
        if self.module.loss is not None and (state := self.module.loss.bimodal.state) is not None:
            state.save(directory)

    def load(self, directory: Path, num_writers: int) -> None:
        """Load the loss's state of this rank's documents, whichever ranks saved it."""
        if self.module.loss is not None and (state := self.module.loss.bimodal.state) is not None:
            state.load(directory, num_writers)


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

        Args:
            output: output of the module.
            config: the contrastive loss.
            num_documents: number of documents in this part.
            num_crowded: number of documents that are too short for their anchors to start at least 2·l_max apart.
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
