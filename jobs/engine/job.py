"""The job that the driver of a training run sends to its workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ray.actor import ActorHandle

from jobs.engine.task import CreateTask
from jobs.engine.tracking import TrackedRun
from jobs.engine.watch import Watch
from jobs.engine.worker_context import WorkerContext

if TYPE_CHECKING:  # the driver does not need DeepSpeed
    from jobs.engine.loop import TrainingLoop


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
    saves_validated: bool = False
    """Whether to write a checkpoint after every validation, so that whoever ends the run early loses no step."""
    shares_cores: bool = False
    """Whether other runs train at the same time on the same machine."""

    def make_loop(self, context: WorkerContext, directory: Path | None) -> TrainingLoop:
        """Return the training loop of a worker, which continues from the checkpoint in a local directory, if any."""
        from jobs.engine.loop import TrainingLoop

        return TrainingLoop(self, context, directory)


@dataclass(frozen=True, slots=True, kw_only=True)
class MembersJob(WorkerJob):
    """The job of several runs that train side by side; its task is a `jobs.engine.side_by_side.MemberTask`."""

    tracked_members: Mapping[str, TrackedRun] = field(default_factory=dict)
    """Name of a member → its MLflow run."""

    def make_loop(self, context: WorkerContext, directory: Path | None) -> TrainingLoop:
        """Return the loop of a worker that trains all members."""
        from jobs.engine.side_by_side import SideBySideLoop

        return SideBySideLoop(self, context, directory)
