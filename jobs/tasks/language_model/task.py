"""The task of training a language model and its TempNet, as the training loop runs it on a worker, alone or with others.

A model is exported as a Transformers directory that loads without this project, with the TempNet in a subdirectory. Of a
frozen base the export only names path and digest, unless `model.whole_export` asks for its weights too; the functions of
`tempnet.base_model` and `tempnet.loading` load both kinds.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed import DeepSpeedEngine
from torch import Tensor
from transformers import AutoConfig

from jobs.engine.deepspeed_engine import deepspeed_config, load_partitioned, whole_parameters
from jobs.engine.export import open_export
from jobs.engine.hardware import GIB, free_memory, worker_device
from jobs.engine.task import ParameterGroup, RhoSteering, StepResult, Task
from jobs.tasks.base import DataReference, base_and_tempnet_groups, feature_cache, num_stored_readers, order_of
from jobs.tasks.language_model.config import LanguageModelConfig
from jobs.tasks.language_model.data import write_training_text
from jobs.tasks.language_model.models import build_models, find_divisible_base, flops_per_token
from jobs.tasks.language_model.validation import read_part, to_tensors, validate
from jobs.tasks.text import cache_for, find
from pipelines.features import Features, FeatureSource
from pipelines.local_copy import local_copy
from pipelines.stream import Batch
from pipelines.text.blocks import BlockSource
from pipelines.text.packing import IGNORE_INDEX
from pipelines.text.tokenization import load_tokenizer
from tempnet.base_model import BaseReference
from tempnet.models.causal_lm import CausalLMOutput, SideBySideCausalLM, TemperatureCausalLM
from tempnet.models.output_head import HEAD_FILE, StoredBase
from tempnet.network import PAIRED_DIRECTORY, TempNet
from tempnet.softmax.fold import FoldCache
from tempnet.statistics import TemperatureStatistics


class LanguageModelTask(Task[LanguageModelConfig]):
    """The task of training a language model and its TempNet; the methods are described in `jobs.engine.task.Task`.

    No model is rated, so that the last one is exported: no earlier TempNet is better while it is still learning.
    """

    unit = "tokens"
    num_oracle_tokens = 256
    """Number of tokens on which intermediate validations compute the optimal temperature (the oracle)."""
    module: Any
    """A `TemperatureCausalLM`, or the `SideBySideCausalLM` of several runs, whose parts the members have."""
    steering: RhoSteering

    def __init__(self, config: LanguageModelConfig, data: DataReference, rank: int, world_size: int) -> None:
        if data.memory:
            config = with_fitting_micro_batch(config, data.memory, is_first=rank == 0)
        train, self.validation_data, self.base = find(data.train), find(data.validation), data.base
        end_is_target = config.data.predicts_end
        reading = order_of(config, train)
        source: BlockSource | FeatureSource
        self.features: Features | None = None
        """The stored hidden states of the training text; None if the base computes them."""
        if data.features is None:
            source = BlockSource(manifest=train, cache_bytes=cache_for(config, train), end_is_target=end_is_target)
        else:
            self.features = Features.load(data.features[0], train)
            self.validation_data = Features.load(data.features[1], self.validation_data)
            size = feature_cache(config, train, [self.features.blocks])
            source = FeatureSource(features=self.features, cache_bytes=size, end_is_target=end_is_target)
            reading["num_readers"] = num_stored_readers(self.features.directory)
        super().__init__(config, source, rank=rank, world_size=world_size, **reading)

    def build(self, *, is_fresh: bool) -> None:
        """Build the module, and read this rank's part of the validation blocks."""
        place = {"rank": self.rank, "world_size": self.world_size}
        number, end_is_target = self.config.validation.num_blocks, self.config.data.predicts_end
        self.validation = read_part(self.validation_data, number, **place, end_is_target=end_is_target)
        tokenizer = load_tokenizer(self.config.tokenizer)
        divisible = None if self.features else find_divisible_base(self.config)
        base: Any = divisible[0] if divisible else None
        if self.features is not None:
            base = StoredBase.load(Path(local_copy(f"{self.features.directory}/{HEAD_FILE}")))
        modules = build_models([member.config for member in self.make_members()], tokenizer, base)
        self.is_compiled = self.config.workers.compiles and self.features is None
        if divisible is not None:
            load_partitioned(*divisible, deepspeed_config(self.config), rank=self.rank)
        for member, module in zip(self.members, modules, strict=True):
            member._take(module)
        self.module = modules[0] if len(modules) == 1 else SideBySideCausalLM(modules)

    def _take(self, module: TemperatureCausalLM) -> None:
        self.module = module
        self.module.fold_cache = FoldCache(self.config.num_accumulation_steps)
        self.steering = RhoSteering(
            target=self.config.temperature.target_tau,
            gain=self.config.temperature.rho_gain,
            rho=self.module.loss_config.rho,
            limit=math.log(self.module.vocab_size),
            tau_range=self.config.temperature.tau_range,
            apply=self._set_rho,
        )

    def _set_rho(self, rho: float) -> None:
        self.module.loss_config = replace(self.module.loss_config, rho=rho)

    def parameter_groups(self) -> list[ParameterGroup]:
        """Return two groups: the base model and the TempNet."""
        return base_and_tempnet_groups([self.module.base], [self.module.tempnet], self.config.optimizer)

    def flops_per_unit(self) -> float | None:
        """Return the FLOPs of training on one token; None for several runs."""
        return flops_per_token(self.module, self.config) if len(self.members) == 1 else None

    def num_units(self, batch: Batch) -> int:
        """Return the number of tokens to predict (valid targets) in this rank's part of a batch."""
        return int((batch["targets"] != IGNORE_INDEX).sum())

    def train_step(
        self, engine: DeepSpeedEngine, batch: Batch, *, step: int, num_units: int, with_statistics: bool
    ) -> StepResult:
        # DeepSpeed averages gradients over ranks and micro-batches, but the loss is the sum over tokens divided by the
        # tokens of the whole batch.
        num_parts = self.world_size * self.config.num_accumulation_steps
        are_steered = [member.steering.follows(engine.optimizer, member.number) for member in self.members]
        seen: list[list[Tensor]] = [[] for _ in self.members]
        options: dict[str, Any] = {"num_targets": max(num_units, 1) / num_parts, "with_statistics": with_statistics}
        losses: list[Tensor] = []
        sums: list[Tensor] = []
        size = self.config.micro_batch_size
        for at in range(0, len(batch["targets"]), size):
            tensors = to_tensors({name: value[at : at + size] for name, value in batch.items()}, engine.device)
            outputs = self._forward(engine, **tensors, **options)
            own = [output["loss"] for output in outputs]
            engine.backward(sum(own[1:], own[0]))
            engine.step()
            losses.append(torch.stack(own).detach() / num_parts)
            for output, is_steered, kept in zip(outputs, are_steered, seen, strict=True):
                if is_steered:
                    is_valid = tensors["targets"] != IGNORE_INDEX
                    kept.append(torch.stack([output["tau"][is_valid], output["slopes"][is_valid]]))
            if with_statistics:
                known = [output["statistics"] for output in outputs if output["statistics"] is not None]
                sums.append(torch.stack(known))
        for member, kept in zip(self.members, seen, strict=True):
            member.module.fold_cache.clear(keep_gram=self.config.model.is_frozen)
            if kept:
                member.steering.observe(*torch.cat(kept, dim=1))
        statistics: Any = None
        if sums:
            ranges = [(member.module.loss_config.tau_min, member.module.loss_config.tau_max) for member in self.members]
            totals = zip(torch.stack(sums).sum(0), ranges, strict=True)
            statistics = [TemperatureStatistics(total, *ends) for total, ends in totals]
        return StepResult(torch.stack(losses).sum(0).squeeze(), statistics)

    def _forward(self, engine: Any, *, num_profile_nodes: Sequence[int] = (), **batch: Any) -> list[CausalLMOutput]:
        """Return the outputs of all members for a micro-batch; the arguments are those of `SideBySideCausalLM`."""
        if len(self.members) > 1:
            found: list[CausalLMOutput] = engine(**batch, num_profile_nodes=num_profile_nodes)
            return found
        return [engine(**batch, num_profile_nodes=sum(num_profile_nodes))]

    def validate(
        self, engine: DeepSpeedEngine, *, with_details: bool
    ) -> tuple[dict[str, float], dict[str, Any] | None]:
        """Return the loss at τ = 1 and at the model's τ, and other scores; see `Tally.scores` for the details."""
        (result,) = self.validate_members([self], engine, with_details=with_details)
        return result

    def validate_members(
        self, members: Sequence[LanguageModelTask], engine: DeepSpeedEngine, *, with_details: bool
    ) -> list[tuple[dict[str, float], dict[str, Any] | None]]:
        """Validate some of the members, with the hidden states and logits of a micro-batch computed once for all."""

        def forward(*, num_profile_nodes: list[int], **batch: Any) -> list[CausalLMOutput]:
            nodes = dict(zip((member.number for member in members), num_profile_nodes, strict=True))
            wanted = [nodes.get(number, 0) for number in range(len(self.members))]
            outputs = self._forward(engine, **batch, num_profile_nodes=wanted)
            return [outputs[number] for number in nodes]

        tallies = validate(
            forward,
            self.validation,
            [member.module.loss_config for member in members],
            vocab_size=self.members[0].module.vocab_size,
            micro_batch_size=self.config.micro_batch_size,
            num_oracle_tokens=self.config.validation.num_oracle_tokens if with_details else self.num_oracle_tokens,
            with_details=with_details,
            device=engine.device,
        )
        results = []
        for member, tally in zip(members, tallies, strict=True):
            scores, details = tally.scores()
            results.append((scores | member.steering.scores(), details))
        return results

    def describe(self, scores: Mapping[str, float]) -> str:
        return (
            f"cross-entropy {scores['cross_entropy']:.4f} at τ = 1, {scores['cross_entropy_tau']:.4f} at τ; "
            f"mean τ {scores['tau_mean']:.3f}"
        )

    def export(self) -> None:
        """Write tokenizer, TempNet and the base model, or the reference to a frozen base."""
        base = None if self.config.model.whole_export else self.base
        export_model(self.module, self.config, is_first=self.rank == 0, base=base)


def export_model(
    module: TemperatureCausalLM, config: LanguageModelConfig, *, is_first: bool, base: BaseReference | None
) -> None:
    """Write base model, or the reference `base` to it, tokenizer and TempNet into the directory `export` of the run.

    All ranks must call this; only the first rank (`is_first`) writes.
    """
    assert base is None or module.tempnet is not None
    part: Any = module if base is None else module.tempnet
    # Every rank takes part in gathering them; only the first keeps them.
    weights = {name: value for name, value in whole_parameters(part, config.workers.zero_stage) if is_first}
    if not is_first:
        return
    with open_export(config.run.export_directory) as directory:
        loss = "" if config.model.is_frozen else module.loss_config.name
        write_training_text(directory, config.data.train, config.model.path, loss=loss)
        if base is None:
            module.base.save_pretrained(directory, state_dict=_base_weights(module, weights))
        else:
            _save_configuration(module, config, directory)
            base.save(directory)
        load_tokenizer(config.tokenizer).save_pretrained(directory)
        if module.tempnet is not None:
            network = TempNet(module.tempnet.config)
            network.load_state_dict(_below("tempnet.", weights) if base is None else weights)
            network.save_pretrained(directory / PAIRED_DIRECTORY)


def _save_configuration(module: TemperatureCausalLM, config: LanguageModelConfig, directory: Path) -> None:
    """Write the configuration of the base, so that an export without its weights still says what it is."""
    if isinstance(module.base, StoredBase) or config.model.precision:  # else it would say that the base has eight bits
        place = local_copy(config.model.path, with_weights=False)
        AutoConfig.from_pretrained(place, trust_remote_code=config.model.trust_remote_code).save_pretrained(directory)
        return
    module.base.config.save_pretrained(directory)
    if module.base.generation_config is not None:
        module.base.generation_config.save_pretrained(directory)


def _base_weights(module: TemperatureCausalLM, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of the base by their names in it, without an output weight that is tied to the input."""
    base = _below("base.", weights)
    if module.base.config.tie_word_embeddings:
        output = module.base.get_output_embeddings()
        tied = {f"{name}.weight" for name, part in module.base.named_modules() if part is output}
        base = {name: value for name, value in base.items() if name not in tied}
    return base


def _below(prefix: str, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}


def with_fitting_micro_batch(
    config: LanguageModelConfig, memory: Mapping[int, float], *, is_first: bool
) -> LanguageModelConfig:
    """Return the configuration with the largest micro-batch that fits on every worker; all workers call this.

    `memory` holds size → bytes, which are right within 20 %. The room is 80 % of the free memory, and `workers.memory_gib`.
    """
    workers, world_size = config.workers, config.workers.max_workers
    free = free_memory(workers, num_local_workers=int(os.environ.get("LOCAL_WORLD_SIZE", world_size)))
    room = min(0.8 * free, (workers.memory_gib or math.inf) * GIB)
    if world_size > 1:
        least = torch.tensor(room, dtype=torch.float64, device=worker_device(workers))
        dist.all_reduce(least, dist.ReduceOp.MIN)
        room = least.item()
    share = config.optimizer.batch_size // world_size
    size = max((size for size, needed in memory.items() if share % size == 0 and needed <= room), default=1)
    if is_first:
        print(f"micro-batches of {size} blocks: {memory[size] / GIB:.1f} of {room / GIB:.1f} GiB", flush=True)
    return config.with_micro_batch_size(size)
