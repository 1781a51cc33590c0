"""Runs that train their networks side by side on one frozen base: which can, and what their tasks have in common."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from torch import nn

from jobs.engine.config import OptimizerSection, TrainingConfig
from jobs.engine.hardware import worker_device
from jobs.engine.identity import fixed_values
from jobs.engine.side_by_side import NetworksEngine
from jobs.engine.task import Statistics

_SHARED_OPTIMIZER = ("batch_size", "micro_batch_size")


def can_share_base(configs: Sequence[TrainingConfig]) -> bool:
    """Return whether runs can train side by side: on one frozen base, with the same data in the same order.

    They may differ in the temperature section and in the settings of the optimizer, except for the batch.
    """
    first, *others = configs
    networks_fit = all(config.trains_networks_alone and not config.run.start_from for config in configs)
    return networks_fit and all(_shared(config) == _shared(first) for config in others)


def _shared(config: TrainingConfig) -> dict[str, Any]:
    own = {f"optimizer.{item.name}" for item in dataclasses.fields(OptimizerSection)}
    own -= {f"optimizer.{name}" for name in _SHARED_OPTIMIZER}
    return {
        name: value
        for name, value in fixed_values(config).items()
        if not name.startswith("temperature.") and name not in own and name != "run.name"
    }


class MembersTask:
    """Mixin of a task of several members (`jobs.engine.side_by_side.MemberTask`), which comes before the task of one.

    A class that has it sets `module` and `networks` when it is built, and keeps the statistics of a step in `statistics`.

    Args:
        arguments: those of the task of one run, with the configuration of the group.
        names: names of the members.
        configs: configurations of the members.
    """

    config: TrainingConfig
    world_size: int
    module: Any
    """Holds the base once, and the network of every member."""
    networks: Sequence[nn.Module]
    """What is trained for every member."""
    statistics: list[Statistics] | None = None
    """Statistics of every member's last step, if they were requested."""

    def __init__(self, *arguments: Any, names: Sequence[str], configs: Sequence[Any]) -> None:
        super().__init__(*arguments)
        self.names, self.configs = names, configs

    def start_engine(self) -> NetworksEngine:
        """Return the engine that trains all networks."""
        return NetworksEngine(
            self.module,
            self.networks,
            self.configs,
            device=worker_device(self.config.workers),
            world_size=self.world_size,
        )

    def take_statistics(self) -> list[Statistics] | None:
        """Return the statistics of every member's last step, if they were requested, and forget them."""
        statistics, self.statistics = self.statistics, None
        return statistics

    def flops_per_unit(self) -> float | None:
        """Return None: the share of the peak is not logged for several members."""
        return None
