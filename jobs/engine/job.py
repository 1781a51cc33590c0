"""The job that the driver of a training run sends to its workers."""

from __future__ import annotations

from dataclasses import dataclass

from ray.actor import ActorHandle

from jobs.engine.task import CreateTask
from jobs.engine.tracking import TrackedRun
from jobs.engine.watch import Watch


class FatalTrainingError(RuntimeError):
    """The run cannot continue, and restarting it would fail in the same way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerJob:
    """Everything that the driver sends to every worker."""

    create_task: CreateTask
    """Creates the task, which holds the configuration of the run."""
    tracked_run: TrackedRun | None
    mailbox: ActorHandle | None
    """Actor that carries progress to the driver's terminal; None if progress is not shown there."""
    with_bar: bool
    """Whether progress is drawn as a bar (a terminal) or as lines (a log file)."""
    watch: Watch | None = None
    """Decides after every validation whether to end the run early; None: the run is never ended early."""
    shares_cores: bool = False
    """Whether other runs train at the same time on the same machine."""
