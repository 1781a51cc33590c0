"""The task of training a language model and its TempNet, as the training loop runs it on a worker, alone or with others.

A model is exported as a Transformers directory that loads without this project, with the TempNet in a subdirectory. Of a
frozen base the export only names path and digest, unless `model.whole_export` asks for its weights too; the functions of
`tempnet.base_model` and `tempnet.loading` load both kinds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from torch import Tensor, nn
from transformers import AutoConfig

from jobs.engine.deepspeed_engine import deepspeed_config, load_partitioned, whole_parameters
from jobs.engine.export import open_export
from jobs.engine.rho import RhoSteering
from jobs.engine.task import ParameterGroup, StepResult
from jobs.tasks.base import (
    GIB,
    BaseTask,
    DataReference,
    MembersTask,
    base_and_tempnet_groups,
    num_stored_readers,
)
from jobs.tasks.language_model.config import LanguageModelConfig
from jobs.tasks.language_model.data import write_training_text
from jobs.tasks.language_model.models import (
    add_tempnet,
    build_base,
    build_model,
    find_divisible_base,
    flops_per_token,
)
from jobs.tasks.language_model.validation import Tally, ValidationPart, to_tensors, validate
from jobs.tasks.text import cache_for, find
from pipelines.features import Features, FeatureSource
from pipelines.local_copy import local_copy
from pipelines.stream import Batch
from pipelines.text.blocks import BlockSource
from pipelines.text.packing import IGNORE_INDEX
from pipelines.text.tokenization import load_tokenizer
from tempnet.base_model import BaseReference
from tempnet.models.causal_lm import CausalLMOutput, TemperatureCausalLM
from tempnet.models.output_head import HEAD_FILE, StoredBase, output_weight
from tempnet.network import PAIRED_DIRECTORY, TempNet
from tempnet.oracle import SharedOracle
from tempnet.softmax.fold import FoldCache
from tempnet.softmax.linear import LinearLoss, NetworkLoss, side_by_side_losses
from tempnet.statistics import TemperatureStatistics


class LanguageModelTask(BaseTask[LanguageModelConfig]):
    """The task of training a language model and its TempNet; the methods are described in `jobs.engine.task.Task`.

    No model is rated, so that the last one is exported: no earlier TempNet is better while it is still learning.
    """

    unit = "tokens"
    num_oracle_tokens = 256
    """Number of tokens on which intermediate validations compute the optimal temperature (the oracle)."""
    module: TemperatureCausalLM
    steering: RhoSteering

    def __init__(self, config: LanguageModelConfig, data: DataReference, rank: int, world_size: int) -> None:
        train, self.validation_data, self.base = find(data.train), find(data.validation), data.base
        end_is_target = config.data.predicts_end
        reading: dict[str, Any] = {}
        source: BlockSource | FeatureSource
        self.features: Features | None = None
        """The stored hidden states of the training text; None if the base computes them."""
        if data.features is None:
            source = BlockSource(manifest=train, cache_bytes=cache_for(config, train), end_is_target=end_is_target)
        else:
            self.features = Features.load(data.features[0], train)
            self.validation_data = Features.load(data.features[1], self.validation_data)
            size = round(config.data.cache_gib * GIB)
            source = FeatureSource(features=self.features, cache_bytes=size, end_is_target=end_is_target)
            reading["num_readers"] = num_stored_readers(self.features.directory)
        super().__init__(
            config,
            source,
            plan=train.plan(seed=config.run.seed, window_size=config.data.shuffle_window),
            rank=rank,
            world_size=world_size,
            reader_resources=config.data.resources,
            **reading,
        )

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

    def _set_rho(self, rho: float) -> None:
        self.module.loss_config = replace(self.module.loss_config, rho=rho)

    def _read_validation(self) -> None:
        """Read this rank's part of the validation blocks, or of their features."""
        self.validation = ValidationPart.read(
            self.validation_data,
            self.config.validation.num_blocks,
            rank=self.rank,
            world_size=self.world_size,
            end_is_target=self.config.data.predicts_end,
        )

    def _stored_base(self) -> StoredBase | None:
        """Return the output layer of a base whose hidden states are stored; None if the base computes them."""
        if self.features is None:
            return None
        return StoredBase.load(Path(local_copy(f"{self.features.directory}/{HEAD_FILE}")))

    def parameter_groups(self) -> list[ParameterGroup]:
        """Return two groups: the base model and the TempNet."""
        return base_and_tempnet_groups([self.module.base], [self.module.tempnet], self.config.optimizer)

    def flops_per_unit(self) -> float | None:
        """Return the FLOPs of training on one token."""
        return flops_per_token(self.module, self.config)

    def num_units(self, batch: Batch) -> int:
        """Return the number of tokens to predict (valid targets) in this rank's part of a batch."""
        return int((batch["targets"] != IGNORE_INDEX).sum())

    def micro_batches(self, batch: Batch, device: torch.device) -> Iterator[dict[str, Any]]:
        """Yield the tensors of the micro-batches of a batch."""
        size = self.config.micro_batch_size
        for at in range(0, len(batch["targets"]), size):
            yield to_tensors({name: value[at : at + size] for name, value in batch.items()}, device)

    def train_step(
        self, engine: DeepSpeedEngine, batch: Batch, *, step: int, num_units: int, with_statistics: bool
    ) -> StepResult:
        """Train on one global batch, in micro-batches."""
        # DeepSpeed averages gradients over ranks and micro-batches, but the loss is the sum over tokens divided by the
        # tokens of the whole batch.
        num_parts = self.world_size * self.config.num_accumulation_steps
        is_steered = self.steering.follows(engine.optimizer)
        loss_sum = torch.zeros((), device=engine.device)
        seen: list[tuple[Tensor, Tensor]] = []
        sums: Tensor | None = None
        for tensors in self.micro_batches(batch, engine.device):
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
        """Return the loss at τ = 1 and at the model's τ, and other scores; see `Tally.scores` for the details."""

        def forward(*, num_profile_nodes: list[int], **batch: Any) -> list[CausalLMOutput]:
            return [engine(**batch, num_profile_nodes=num_profile_nodes[0])]

        (tally,) = self._validate(forward, [self.module], engine.device, with_details=with_details)
        summary, details = tally.scores()
        return summary | self.steering.scores(), details

    def _validate(
        self, forward: Any, modules: list[TemperatureCausalLM], device: torch.device, *, with_details: bool
    ) -> list[Tally]:
        return validate(
            forward,
            self.validation,
            [module.loss_config for module in modules],
            vocab_size=modules[0].vocab_size,
            micro_batch_size=self.config.micro_batch_size,
            num_oracle_tokens=self.config.validation.num_oracle_tokens if with_details else self.num_oracle_tokens,
            with_details=with_details,
            device=device,
        )

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


class SideBySideTask(MembersTask, LanguageModelTask):
    """The task of training several TempNets on the contexts of one frozen base (`jobs.engine.side_by_side.MemberTask`).

    The members' configurations have ρ as a number.
    """

    config: LanguageModelConfig
    module: Any

    def build(self, *, is_fresh: bool) -> None:
        """Build the base once, and every network as in a run of its own; read this rank's validation blocks."""
        tokenizer = load_tokenizer(self.config.tokenizer)
        stored = self._stored_base()
        torch.manual_seed(self.config.run.seed)
        base = build_base(self.config, tokenizer) if stored is None else stored
        state = torch.get_rng_state()
        self.modules: list[TemperatureCausalLM] = []
        self.members: list[NetworkLoss] = []
        for config in self.configs:
            torch.set_rng_state(state)
            self.modules.append(module := add_tempnet(base, config, tokenizer))
            assert module.tempnet is not None
            cache = FoldCache(self.config.num_accumulation_steps)
            self.members.append(NetworkLoss(config=module.loss_config, tempnet=module.tempnet, fold_cache=cache))
        self.module = nn.ModuleList(self.modules)
        self.networks = [member.tempnet for member in self.members]
        self.tallies: dict[bool, list[Tally]] = {}
        """With details or not → the validation of all members with their present weights."""
        self._read_validation()

    def train_step(self, engine: Any, batch: Batch, *, step: int, num_units: int, with_statistics: bool) -> StepResult:
        """Train all networks on one global batch, in micro-batches; the loss has one entry for each member."""
        # The gradients are scaled as DeepSpeed scales those of one run.
        num_micro = self.config.num_accumulation_steps
        num_parts = self.world_size * num_micro
        num_targets = max(num_units, 1) / num_parts
        scale = 1 / num_micro / num_targets
        losses = torch.zeros(len(self.members), device=engine.device)
        sums: list[Tensor] | None = None
        for tensors in self.micro_batches(batch, engine.device):
            hidden, targets = self._hidden(**tensors), tensors["targets"].flatten()
            found = self._losses(hidden, targets, num_targets, with_values=with_statistics, gradient_scale=scale)
            losses += torch.stack([one.loss for one in found]) / num_parts
            if with_statistics:
                new = self._statistics(found, hidden, targets)
                sums = new if sums is None else [total + more for total, more in zip(sums, new, strict=True)]
        engine.step()
        self.tallies = {}
        for member in self.members:
            assert member.fold_cache is not None
            member.fold_cache.clear(keep_gram=True)
        if sums is not None:
            self.statistics = [
                TemperatureStatistics(total, member.config.tau_min, member.config.tau_max)
                for total, member in zip(sums, self.members, strict=True)
            ]
        return StepResult(losses, None)

    def validate_member(self, number: int, *, with_details: bool) -> tuple[dict[str, float], dict[str, Any] | None]:
        """Validate one member; all of them are run over the validation blocks together."""
        if with_details not in self.tallies:
            device = next(self.module.parameters()).device
            self.tallies[with_details] = self._validate(self._forward, self.modules, device, with_details=with_details)
        return self.tallies[with_details][number].scores()

    def export_member(self, number: int) -> None:
        """Write the export of one member into its own directory."""
        config = self.configs[number]
        config = replace(config, workers=replace(config.workers, zero_stage=0))
        base = None if config.model.whole_export else self.base
        export_model(self.modules[number], config, is_first=self.rank == 0, base=base)

    def _forward(
        self, *, targets: Tensor, oracle_rows: Tensor, num_profile_nodes: list[int], **batch: Any
    ) -> list[dict[str, Any]]:
        """Return what the module of every member would return for a micro-batch of validation."""
        hidden, wanted = self._hidden(**batch), targets.flatten()
        found = self._losses(hidden, wanted, 1.0, with_values=True)
        statistics = self._statistics(found, hidden, wanted, oracle_rows)
        profiles = {nodes: self.modules[0].profiles(hidden, wanted, nodes) for nodes in {*num_profile_nodes} - {0}}
        outputs = []
        for own, sums, nodes in zip(found, statistics, num_profile_nodes, strict=True):
            assert own.values is not None
            outputs.append(
                {
                    "tau": own.tau.view_as(targets),
                    "statistics": sums,
                    "entropy": own.values.entropy.view_as(targets),
                    "cross_entropy_tau": own.values.cross_entropy_tau.view_as(targets),
                    "profiles": profiles.get(nodes),
                }
            )
        return outputs

    def _hidden(self, *, input_ids: Any, position_ids: Any, hidden: Tensor | None = None, **_: Any) -> Tensor:
        """Return the hidden states (N, d) of a micro-batch, stored or computed by the base."""
        module = self.modules[0]
        if hidden is not None:
            return hidden.to(output_weight(module.base)[0].dtype).flatten(0, 1)
        with torch.no_grad():
            return module.contexts(input_ids, position_ids).flatten(0, 1)

    def _losses(
        self,
        hidden: Tensor,
        targets: Tensor,
        num_targets: float,
        *,
        with_values: bool,
        gradient_scale: float | None = None,
    ) -> list[LinearLoss]:
        """Compute the losses of all members for hidden states (N, d) and targets (N,); see `side_by_side_losses`."""
        first = self.modules[0]
        weight, bias = output_weight(first.base)
        assert first.head is not None
        return side_by_side_losses(
            first.head.scaled(hidden),
            weight,
            targets,
            self.members,
            num_targets=num_targets,
            gradient_scale=gradient_scale,
            with_values=with_values,
            vocab_size=first.vocab_size,
            bias=bias if bias is None or first.head.scale == 1.0 else bias * first.head.scale,
            soft_cap=first.head.soft_cap,
            matmul_dtype=first.autocast_dtype,
        )

    def _statistics(
        self, losses: list[LinearLoss], hidden: Tensor, targets: Tensor, oracle_rows: Tensor | None = None
    ) -> list[Tensor]:
        """Return the sums of `TemperatureStatistics` of every member."""
        found, oracle = [], SharedOracle()
        for module, own in zip(self.modules, losses, strict=True):
            assert own.values is not None
            found.append(module.statistics(hidden, targets, own.tau, own.values, oracle_rows, oracle))
        return found


def export_model(
    module: TemperatureCausalLM, config: LanguageModelConfig, *, is_first: bool, base: BaseReference | None
) -> None:
    """Write base model, tokenizer and TempNet into the directory `export` of the run.

    All ranks must call this; only the first rank (`is_first`) writes. `base` is the reference to write instead of the
    weights of the base; None: the weights are written.
    """
    assert base is None or module.tempnet is not None
    part: Any = module if base is None else module.tempnet
    weights: dict[str, Tensor] = {}
    for name, value in whole_parameters(part, config.workers.zero_stage):
        if is_first:
            weights[name] = value
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
