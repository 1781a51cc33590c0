"""What the tasks of several members have in common (`jobs.engine.side_by_side.MemberTask`), whatever their base is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from jobs.engine.config import TrainingConfig
from jobs.engine.hardware import worker_device
from jobs.engine.networks_engine import NetworksEngine
from jobs.engine.task import Statistics


class MembersTask:
    """Mixin of a task of several members, which comes before the task of one.

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
