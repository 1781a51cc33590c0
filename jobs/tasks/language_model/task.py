"""The task of training a language model and its TempNet, as the training loop runs it on a worker."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from torch import Tensor

from jobs.engine.deepspeed_engine import deepspeed_config, load_partitioned
from jobs.engine.rho import RhoSteering
from jobs.engine.task import ParameterGroup, StepResult
from jobs.tasks.base import BaseTask, base_and_tempnet_groups
from jobs.tasks.frozen_base import check_checkpoint
from jobs.tasks.language_model.config import LanguageModelConfig
from jobs.tasks.language_model.export import export_model
from jobs.tasks.language_model.flops import flops_per_token
from jobs.tasks.language_model.models import build_model, find_divisible_base
from jobs.tasks.language_model.validation import ValidationPart, to_tensors, validate
from jobs.tasks.node_cache import GIB
from jobs.tasks.text.data import cache_for
from pipelines.features import Features, FeatureSource
from pipelines.local_copy import local_copy
from pipelines.object_store import is_local
from pipelines.storage import resolve
from pipelines.stream import Batch
from pipelines.text.blocks import BlockSource
from pipelines.text.growing import GrowingManifest
from pipelines.text.manifest import Manifest
from pipelines.text.packing import IGNORE_INDEX
from pipelines.text.tokenization import load_tokenizer
from tempnet.base_model import BaseReference
from tempnet.models.causal_lm import TemperatureCausalLM
from tempnet.models.output_head import HEAD_FILE, StoredBase
from tempnet.softmax.fold import FoldCache
from tempnet.statistics import TemperatureStatistics


class LanguageModelTask(BaseTask[LanguageModelConfig]):
    """The task of training a language model and its TempNet; the methods are described in `jobs.engine.task.Task`.

    No model is rated, so that the last one is exported: no earlier TempNet is better while it is still learning.
    """

    unit = "tokens"
    num_oracle_tokens = 256
    """Number of tokens on which intermediate validations compute the optimal temperature (the oracle)."""
    module: TemperatureCausalLM

    def __init__(
        self,
        config: LanguageModelConfig,
        train: Manifest | GrowingManifest,
        validation: Manifest,
        base: BaseReference | None,
        features: tuple[Features, Features] | None,
        rank: int,
        world_size: int,
    ) -> None:
        source: BlockSource | FeatureSource = BlockSource(
            manifest=train, cache_bytes=cache_for(config, train), end_is_target=config.data.predicts_end
        )
        reading: dict[str, Any] = {}
        if features is not None:
            source = FeatureSource(
                features=features[0],
                cache_bytes=round(config.data.cache_gib * GIB),
                end_is_target=config.data.predicts_end,
            )
            # Local files are memory-mapped, and a copy through Ray's object store would cost more than reading them.
            reading["num_readers"] = 0 if is_local(resolve(features[0].directory)[0]) else 1
        super().__init__(
            config,
            source,
            plan=train.plan(seed=config.run.seed, window_size=config.data.shuffle_window),
            rank=rank,
            world_size=world_size,
            reader_resources=config.data.resources,
            **reading,
        )
        self.features = features
        self.validation_manifest = validation
        self.base = base

    def build(self, *, is_fresh: bool) -> None:
        """Build the module, and read this rank's part of the validation blocks."""
        tokenizer = load_tokenizer(self.config.tokenizer)
        divisible = None if self.features else find_divisible_base(self.config)
        if divisible is None:
            self.module = build_model(self.config, tokenizer, self._stored_base())
        else:
            base, files = divisible
            self.module = build_model(self.config, tokenizer, base)
            load_partitioned(base, files, deepspeed_config(self.config), rank=self.rank)
        self.module.fold_cache = FoldCache(self.config.num_accumulation_steps)
        self.steering = RhoSteering(
            self.config.temperature,
            rho=self.module.loss_config.rho,
            limit=math.log(self.module.vocab_size),
            tau_range=self.config.temperature.tau_range,
            apply=self._set_rho,
        )
        self._read_validation()

    def _read_validation(self) -> None:
        """Read this rank's part of the validation blocks, or of their features."""
        self.validation = ValidationPart.read(
            self.features[1] if self.features else self.validation_manifest,
            self.config.validation.num_blocks,
            rank=self.rank,
            world_size=self.world_size,
            end_is_target=self.config.data.predicts_end,
        )

    def _stored_base(self) -> StoredBase | None:
        """Return the output layer of a base whose hidden states are stored; None if the base computes them."""
        if self.features is None:
            return None
        return StoredBase.load(Path(local_copy(f"{self.features[0].directory}/{HEAD_FILE}")))

    def parameter_groups(self) -> list[ParameterGroup]:
        """Return two groups: the base model and the TempNet."""
        return base_and_tempnet_groups([self.module.base], [self.module.tempnet], self.config.optimizer)

    def flops_per_unit(self) -> float | None:
        """Return the FLOPs of training on one token."""
        return flops_per_token(self.module, self.config)

    def num_units(self, batch: Batch) -> int:
        """Return the number of tokens to predict (valid targets) in this rank's part of a batch."""
        return int((batch["targets"] != IGNORE_INDEX).sum())

    def train_step(
        self, engine: DeepSpeedEngine, batch: Batch, *, step: int, num_units: int, with_statistics: bool
    ) -> StepResult:
        """Train on one global batch, in micro-batches."""
        # DeepSpeed averages gradients over ranks and micro-batches, but the loss is the sum over tokens divided by the
        # tokens of the whole batch.
        num_parts = self.world_size * self.config.num_accumulation_steps
        micro = self.config.micro_batch_size
        is_steered = self.steering.follows(engine.optimizer)
        loss_sum = torch.zeros((), device=engine.device)
        seen: list[tuple[Tensor, Tensor]] = []
        sums: Tensor | None = None
        for at in range(0, len(batch["targets"]), micro):
            tensors = to_tensors({name: value[at : at + micro] for name, value in batch.items()}, engine.device)
            output = engine(**tensors, num_targets=max(num_units, 1) / num_parts, with_statistics=with_statistics)
            engine.backward(output["loss"])
            engine.step()
            loss_sum += output["loss"].detach() / num_parts
            if is_steered:
                is_valid = tensors["targets"] != IGNORE_INDEX
                seen.append((output["tau"][is_valid], output["slopes"][is_valid]))
            if output["statistics"] is not None:
                sums = output["statistics"] if sums is None else sums + output["statistics"]
        assert self.module.fold_cache is not None
        self.module.fold_cache.clear(keep_gram=self.config.model.is_frozen)
        if is_steered:
            tau, slopes = (torch.cat(parts) for parts in zip(*seen, strict=True))
            self.steering.observe(tau, slopes)
        loss = self.module.loss_config
        return StepResult(loss_sum, None if sums is None else TemperatureStatistics(sums, loss.tau_min, loss.tau_max))

    def validate(
        self, engine: DeepSpeedEngine, *, with_details: bool
    ) -> tuple[dict[str, float], dict[str, Any] | None]:
        """Return the loss at τ = 1 and at the model's τ, and other scores; see `ValidationDetails` for the details."""
        summary, details = validate(
            engine,
            self.validation,
            loss_config=self.module.loss_config,
            vocab_size=self.module.vocab_size,
            micro_batch_size=self.config.micro_batch_size,
            num_oracle_tokens=self.config.validation.num_oracle_tokens if with_details else self.num_oracle_tokens,
            with_details=with_details,
        )
        return summary | self.steering.scores(), asdict(details) if details else None

    def describe(self, scores: Mapping[str, float]) -> str:
        """Format cross-entropies and mean τ as a short text for a progress line."""
        return (
            f"cross-entropy {scores['cross_entropy']:.4f} at τ = 1, {scores['cross_entropy_tau']:.4f} at τ; "
            f"mean τ {scores['tau_mean']:.3f}"
        )

    def export(self) -> None:
        """Write tokenizer, TempNet and the base model, or the reference to a frozen base."""
        base = None if self.config.model.whole_export else self.base
        export_model(self.module, self.config, is_first=self.rank == 0, base=base)

    def save(self, directory: Path) -> None:
        """Save ρ if it is adjusted during training, and the name of a frozen base; DeepSpeed saves everything else."""
        self.steering.save(directory)
        if self.base is not None and self.rank == 0:
            self.base.save(directory)

    def load(self, directory: Path, num_writers: int) -> None:
        """Load ρ if it is adjusted during training, and check that the checkpoint belongs to this base.

        Raises:
            FatalTrainingError: if the checkpoint was written on another frozen base.
        """
        self.steering.load(directory)
        check_checkpoint(directory, self.base)

    def _set_rho(self, rho: float) -> None:
        self.module.loss_config = replace(self.module.loss_config, rho=rho)
