"""The plan of a sweep: what can be checked and said before Ray starts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jobs.engine.identity import configuration_hash
from jobs.engine.launch import tracking_uri
from jobs.engine.task import Plan
from jobs.studies.sweeps.config import SweepConfig
from jobs.studies.sweeps.search import TITLE, list_corners
from jobs.tasks.dual_encoder.config import ClipConfig
from jobs.tasks.dual_encoder.plan import make_plan as make_clip_plan
from jobs.tasks.language_model.plan import make_plan as make_language_model_plan
from jobs.tasks.side_by_side import can_share_base


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """The plan of a sweep, known before anything starts."""

    config: SweepConfig[Any]
    make_plan: Callable[[Any], Plan]
    plans: Sequence[Plan]
    """Plans of the first round's trials, followed by those of the trials at the ends of the axes."""

    @property
    def shares_base(self) -> bool:
        """Whether the trials train side by side on one frozen base."""
        sweep = self.config.sweep
        if sweep.scheduler != "none" or sweep.search == "band":
            return False
        trials = [self.config.trial(point) for point in next(self.config.start())]
        return sweep.num_side_by_side > 1 < len(trials) and can_share_base(trials)

    @property
    def first(self) -> Plan:
        """Plan of the first trial."""
        return self.plans[0]

    def describe(self) -> str:
        """Returns the plan as text for the terminal."""
        config, run = self.config, self.config.run
        axes = ", ".join(f"{name} {min(axis):g} to {max(axis):g}" for name, axis in config.sweep.values.items())
        limit = "at most " if config.sweep.search == "band" else ""
        early = "" if config.sweep.scheduler == "none" else f", scheduler {config.sweep.scheduler}"
        side_by_side = "side by side on one frozen base, " if self.shares_base else ""
        return (
            f"sweep        {run.name} in {run.directory} (configuration {configuration_hash(config)})\n"
            f"trials       {side_by_side}{limit}{config.sweep.max_num_trials} ({config.sweep.search}{early}): {axes}\n"
            f"goal         a mean τ from {config.sweep.band[0]:g} to {config.sweep.band[1]:g}, then the lowest "
            f"{TITLE}\n\nThe first trial:\n{self.first.describe()}"
        )


def make_sweep(config: SweepConfig[Any]) -> Sweep:
    """Check everything that can be checked without Ray.

    Raises:
        ValueError, FileNotFoundError, OSError: naming the field, its value and the legal values.
    """
    # The trials log to the MLflow store of the sweep; by default they would create a database in their own storage.
    uri = tracking_uri(config.base)
    tracking = dataclasses.replace(config.base.tracking, uri=uri, enabled=bool(uri))
    config = dataclasses.replace(config, base=dataclasses.replace(config.base, tracking=tracking))
    is_clip = isinstance(config.base, ClipConfig)
    make_plan: Callable[[Any], Plan] = make_clip_plan if is_clip else make_language_model_plan
    trials = [config.trial(point) for point in [*next(config.start()), *list_corners(config.sweep.values)]]
    return Sweep(
        config=config,
        make_plan=make_plan,
        plans=[make_plan(trial) for trial in trials],
    )
