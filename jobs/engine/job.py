"""What travels between the driver and the workers of a training run."""

from __future__ import annotations

from dataclasses import dataclass

from ray.actor import ActorHandle

from jobs.engine.config import TrainingConfig
from jobs.engine.task import TaskSpec
from jobs.engine.tracking import TrackedRun
from jobs.engine.watch import Watch


class FatalTrainingError(RuntimeError):
    """The run cannot go on, and starting it again would end the same way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerJob:
    """What the driver sends to every worker."""

    config: TrainingConfig
    spec: TaskSpec
    tracked_run: TrackedRun | None
    mailbox: ActorHandle | None
    """Carries progress to the driver's terminal; None where it is not shown."""
    with_bar: bool
    """Whether progress is drawn as a bar (a terminal) or as lines (a log file)."""
    watch: Watch | None = None
    """May end the run early."""
    shares_cores: bool = False
    """Other runs go on beside this one."""
