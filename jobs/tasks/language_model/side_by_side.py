"""The task of training several TempNets on the contexts of one frozen base."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from jobs.engine.task import StepResult
from jobs.tasks.frozen_base import check_checkpoint
from jobs.tasks.language_model.config import LanguageModelConfig
from jobs.tasks.language_model.export import export_model
from jobs.tasks.language_model.models import add_tempnet, build_base
from jobs.tasks.language_model.task import LanguageModelTask
from jobs.tasks.language_model.validation import to_tensors, validate
from jobs.tasks.side_by_side import MembersTask
from pipelines.stream import Batch
from pipelines.text.tokenization import load_tokenizer
from tempnet.models.causal_lm import TemperatureCausalLM
from tempnet.models.output_head import output_weight
from tempnet.oracle import SharedOracle
from tempnet.softmax.fold import FoldCache
from tempnet.softmax.linear import LinearLoss, NetworkLoss, side_by_side_losses
from tempnet.statistics import TemperatureStatistics


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
        for config in self.configs:
            torch.set_rng_state(state)
            self.modules.append(add_tempnet(base, config, tokenizer))
        self.module = nn.ModuleList(self.modules)
        self.members = [
            NetworkLoss(
                config=module.loss_config,
                tempnet=_network(module),
                fold_cache=FoldCache(self.config.num_accumulation_steps),
            )
            for module in self.modules
        ]
        self.networks = [member.tempnet for member in self.members]
        self.scored: list[list[LinearLoss]] | None = None
        """Losses of all members for every micro-batch of the validation blocks, at the present weights."""
        # The base is frozen, so that the logits of the validation blocks never change. With details there are more of them.
        self.profiles: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self.oracles: dict[bool, defaultdict[int, SharedOracle]] = {
            with_details: defaultdict(SharedOracle) for with_details in (False, True)
        }
        self._read_validation()

    def train_step(self, engine: Any, batch: Batch, *, step: int, num_units: int, with_statistics: bool) -> StepResult:
        """Train all networks on one global batch, in micro-batches; the loss has one entry for each member."""
        # The gradients are scaled as DeepSpeed scales those of one run.
        num_micro = self.config.num_accumulation_steps
        num_parts = self.world_size * num_micro
        num_targets = max(num_units, 1) / num_parts
        losses = torch.zeros(len(self.members), device=engine.device)
        sums: list[Tensor] | None = None
        for part in self._micro_batches(batch):
            tensors = to_tensors(part, engine.device)
            hidden, targets = self._hidden(tensors).flatten(0, 1), tensors["targets"].flatten()
            found = self._losses(
                hidden,
                targets,
                num_targets=num_targets,
                gradient_scale=1 / num_micro / num_targets,
                with_values=with_statistics,
            )
            losses += torch.stack([one.loss for one in found]) / num_parts
            if with_statistics:
                new = self._statistics_of(found, hidden, targets)
                sums = new if sums is None else [total + more for total, more in zip(sums, new, strict=True)]
        engine.step()
        self.scored = None
        for member in self.members:
            assert member.fold_cache is not None
            member.fold_cache.clear(keep_gram=True)
        if sums is not None:
            self.statistics = [
                TemperatureStatistics(total, module.loss_config.tau_min, module.loss_config.tau_max)
                for total, module in zip(sums, self.modules, strict=True)
            ]
        return StepResult(losses, None)

    def validate_member(self, number: int, *, with_details: bool) -> tuple[dict[str, float], dict[str, Any] | None]:
        """Validate one member; hidden states are computed once in a run, and all members' losses together."""
        if "hidden" not in self.validation.arrays:
            self.validation = dataclasses.replace(self.validation, arrays=self._with_hidden(self.validation.arrays))
        if self.scored is None:
            self.scored = self._score()
        module = self.modules[number]
        stand_in: Any = ScoredModule(
            module, [losses[number] for losses in self.scored], self.oracles[with_details], self.profiles
        )
        summary, details = validate(
            stand_in,
            self.validation,
            loss_config=module.loss_config,
            vocab_size=module.vocab_size,
            micro_batch_size=self.config.micro_batch_size,
            num_oracle_tokens=self.config.validation.num_oracle_tokens if with_details else self.num_oracle_tokens,
            with_details=with_details,
        )
        return summary, dataclasses.asdict(details) if details else None

    def export_member(self, number: int) -> None:
        """Write the export of one member into its own directory."""
        config = dataclasses.replace(
            self.configs[number], workers=dataclasses.replace(self.configs[number].workers, zero_stage=0)
        )
        base = None if config.model.whole_export else self.base
        export_model(self.modules[number], config, is_first=self.rank == 0, base=base)

    def save(self, directory: Any) -> None:
        """Save the name of the base; the engine saves the networks."""
        if self.base is not None and self.rank == 0:
            self.base.save(directory)

    def load(self, directory: Any, num_writers: int) -> None:
        """Check that the checkpoint belongs to this base."""
        check_checkpoint(directory, self.base)

    def _losses(self, hidden: Tensor, targets: Tensor, **options: Any) -> list[LinearLoss]:
        """Compute the losses of all members for hidden states (N, d) and targets (N,); see `side_by_side_losses`."""
        first = self.modules[0]
        weight, bias = output_weight(first.base)
        assert first.head is not None
        return side_by_side_losses(
            first.head.scaled(hidden),
            weight,
            targets,
            self.members,
            vocab_size=first.vocab_size,
            bias=bias if bias is None or first.head.scale == 1.0 else bias * first.head.scale,
            soft_cap=first.head.soft_cap,
            matmul_dtype=first.autocast_dtype,
            **options,
        )

    def _statistics_of(self, losses: list[LinearLoss], hidden: Tensor, targets: Tensor) -> list[Tensor]:
        """Return the sums of `TemperatureStatistics` of every member."""
        found, oracle = [], SharedOracle()
        for module, own in zip(self.modules, losses, strict=True):
            assert own.values is not None
            found.append(module.statistics(hidden, targets, own.tau, own.values, oracle=oracle))
        return found

    def _score(self) -> list[list[LinearLoss]]:
        """Return the losses of all members for every micro-batch of the validation blocks."""
        device = next(self.module.parameters()).device
        scored = []
        for part in self._micro_batches(self.validation.arrays):
            tensors = to_tensors(part, device)
            hidden, targets = self._hidden(tensors).flatten(0, 1), tensors["targets"].flatten()
            scored.append(self._losses(hidden, targets, num_targets=1.0, with_values=True))
        return scored

    def _hidden(self, tensors: Mapping[str, Any]) -> Tensor:
        """Return the hidden states (B, T, d) of a micro-batch, stored or computed by the base."""
        module = self.modules[0]
        if "hidden" in tensors:
            stored: Tensor = tensors["hidden"]
            return stored.to(output_weight(module.base)[0].dtype)
        with torch.no_grad():
            return module.contexts(tensors["input_ids"], tensors["position_ids"])

    @torch.no_grad()
    def _with_hidden(self, arrays: Batch) -> Batch:
        """Return the arrays of blocks with their hidden states in the place of their tokens."""
        device = next(self.module.parameters()).device
        parts = [self._hidden(to_tensors(part, device)).cpu() for part in self._micro_batches(arrays)]
        hidden = torch.cat(parts)
        values = hidden.view(torch.int16) if hidden.dtype == torch.bfloat16 else hidden
        return {"hidden": values.numpy()} | {name: arrays[name] for name in ("targets", "documents")}

    def _micro_batches(self, arrays: Batch) -> Iterator[Batch]:
        size = self.config.micro_batch_size
        for at in range(0, len(arrays["targets"]), size):
            yield {name: np.asarray(value[at : at + size]) for name, value in arrays.items()}


class ScoredModule(SimpleNamespace):
    """Stands for the engine in `validate`, which calls it for one micro-batch after the other and asks for its device.

    Args:
        module: the module of a member.
        losses: its losses of all micro-batches.
        oracles: the oracle of every micro-batch.
        profiles: the profiles of the micro-batches that are known, by number and nodes; the others are added.
    """

    def __init__(
        self,
        module: TemperatureCausalLM,
        losses: list[LinearLoss],
        oracles: Mapping[int, SharedOracle],
        profiles: dict[tuple[int, int], tuple[Tensor, Tensor]],
    ) -> None:
        device = next(module.parameters()).device
        super().__init__(module=module, device=device, losses=enumerate(losses), oracles=oracles, profiles=profiles)

    def __call__(
        self, *, targets: Tensor, hidden: Tensor, oracle_rows: Tensor, num_profile_nodes: int, **_: Any
    ) -> dict[str, Any]:
        """Return what the module would return for the next micro-batch."""
        number, found = next(self.losses)
        assert found.values is not None
        contexts, wanted = hidden.to(output_weight(self.module.base)[0].dtype).flatten(0, 1), targets.flatten()
        key = number, num_profile_nodes
        if num_profile_nodes and key not in self.profiles:
            self.profiles[key] = self.module.profiles(contexts, wanted, num_profile_nodes)
        return {
            "tau": found.tau.view_as(targets),
            "statistics": self.module.statistics(
                contexts, wanted, found.tau, found.values, oracle_rows, self.oracles[number]
            ),
            "entropy": found.values.entropy.view_as(targets),
            "cross_entropy_tau": found.values.cross_entropy_tau.view_as(targets),
            "profiles": self.profiles.get(key),
        }


def _network(module: TemperatureCausalLM) -> Any:
    assert module.tempnet is not None
    return module.tempnet
