"""What a worker of a run does, and what it knows of the processes around it; nothing here needs Ray.

:func:`train_from_newest` is called in every worker of Ray Train (`jobs.engine.ray_train`), or by :func:`train_here`.
"""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobs.engine.console import say_to
from jobs.engine.resumption import (
    FatalTrainingError,
    checkpoint_name,
    find_resumption,
    record_checkpoint,
    start_checkpoint,
    write_record,
)
from pipelines.local_copy import shared_copy

if TYPE_CHECKING:  # the driver needs neither DeepSpeed nor MLflow for these
    from jobs.engine.config import TrainingConfig
    from jobs.engine.metrics import TrackedRun
    from jobs.engine.task import CreateTask

# Set for workers that compute on CPUs. Ray runs their code in a thread, where glibc returns every freed megabyte to the
# kernel, which costs a small step a quarter of its time (benchmarks/README.md); a single arena keeps its memory.
# TORCHDYNAMO_DISABLE keeps DeepSpeed's Muon optimizer from loading torch's compiler, which takes a second or more.
CPU_ENVIRONMENT = {
    "TORCHDYNAMO_DISABLE": "1",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(4 << 30),
    "MALLOC_TOP_PAD_": str(256 << 20),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """Scores of a model on held-out data after some step."""

    step: int
    """Number of optimizer steps that the model was trained for."""
    scores: Mapping[str, float]
    """Name of each score → its value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerContext:
    """The place of one worker among all workers of a run. PyTorch's default process group must exist."""

    rank: int
    world_size: int
    local_world_size: int
    """Number of workers on this machine."""
    report: Callable[..., None]
    """Takes over metrics, name → value, and this rank's part of a checkpoint, a local directory or None, of a `step`. All
    ranks call it for the same step."""
    agree: Callable[[Any], Any] = lambda value: value
    """Returns on all workers what the first one passes; all of them call it."""
    terminal: Any = None
    """The driver's `jobs.engine.console.Mailbox`, or a way to it; None: lines are printed into this worker's log."""
    reads_data: bool = False
    """Whether this worker reads its data itself, without tasks of Ray."""
    is_preempted: Callable[[], bool] = lambda: False
    """Returns whether a machine of this run is about to be taken away."""

    def say(self, line: str) -> None:
        """Print one line on the terminal."""
        say_to(self.terminal, line)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerJob:
    """Everything that the driver sends to every worker."""

    create_task: CreateTask
    tracked_runs: Mapping[str, TrackedRun] = field(default_factory=dict)
    """Name of every run that is logged → its MLflow run."""
    mailbox: Any = None
    """The terminal of the person who started the run (`jobs.engine.console`); None if progress is not shown there."""
    with_bar: bool = False
    """Whether progress is drawn as a bar (a terminal) or as lines (a log file)."""
    saves_validated: bool = False
    """Whether to write a checkpoint after every validation, so that whoever ends the run early loses no step."""
    shares_cores: bool = False
    """Whether other runs train at the same time on the same machine."""
    exported: str = ""
    """Path or URI of a checkpoint that is only loaded and exported; empty: the run is trained."""


def worker_environment(config: TrainingConfig) -> dict[str, str]:
    """Return the environment variables of a training worker."""
    # DeepSpeed compiles with ninja, which is installed beside the Python interpreter and may not be on the PATH.
    environment = {"PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"}
    if not config.workers.use_gpu:
        environment |= {"DS_ACCELERATOR": "cpu", **CPU_ENVIRONMENT}
    if config.workers.compiles:
        environment["TORCHDYNAMO_DISABLE"] = "0"
        if "://" not in config.run.prepared_directory:
            environment["TORCHINDUCTOR_CACHE_DIR"] = f"{config.run.prepared_directory}/compiled"
    return environment


def import_deepspeed() -> None:
    """Import DeepSpeed without MLflow, which its autotuner imports in a second or more and no worker needs so soon."""
    if "mlflow" in sys.modules:
        return
    sys.modules["mlflow"] = None  # type: ignore[assignment]  # `import mlflow` raises ImportError, which DeepSpeed expects
    try:
        import deepspeed  # noqa: F401
    finally:
        del sys.modules["mlflow"]


def train_from_newest(job: WorkerJob, context: WorkerContext, *, directory: str, checkpoint: str) -> dict[str, Any]:
    """Train to the end of the run, from its newest checkpoint that is whole; all workers call this.

    A run that has none begins with `checkpoint`, or at step 0 if that is empty. Rank 0 gets the outcome of the run, and every
    rank `{"fatal": message}` if the run must not be restarted.
    """
    if job.exported:
        return _train(job, context, checkpoint=job.exported, is_own=False)
    damaged: dict[str, str] = {}
    while True:
        own, problem = context.agree(_choose(directory, damaged, context) if context.rank == 0 else ("", ""))
        if problem:
            return {"fatal": problem}
        result = _train(job, context, checkpoint=own or checkpoint, is_own=bool(own))
        if "damaged" not in result:
            return result
        damaged |= result["damaged"]


def _choose(directory: str, damaged: dict[str, str], context: WorkerContext) -> tuple[str, str]:
    """Return the path or URI of the newest whole checkpoint (empty: none), and why the run cannot go on (empty: it can)."""
    try:
        resumption = find_resumption(directory, damaged)
    except ValueError as error:
        return "", str(error)
    for note in resumption.notes:
        context.say(f"{note}; going on from step {resumption.step}")
    write_record(directory, resumption.checkpoints)
    return f"{directory}/{resumption.checkpoints[-1]}" if resumption.checkpoints else "", ""


def _train(job: WorkerJob, context: WorkerContext, *, checkpoint: str, is_own: bool) -> dict[str, Any]:
    """Train to the end of the run, or export; return `{"damaged": {checkpoint: message}}` if one of its own is damaged."""
    import_deepspeed()
    from jobs.engine.checkpoint import DamagedCheckpointError
    from jobs.engine.loop import TrainingLoop
    from pipelines.problems import TooManyProblemsError

    try:
        with shared_copy(checkpoint) if checkpoint else nullcontext() as local:
            try:
                loop = TrainingLoop(job, context, Path(local) if local else None)
            except ValueError as error:  # what the run is given does not fit, which no restart changes
                return {"fatal": str(error)}
        try:
            if job.exported:
                loop.task.export()
                return {}
            outcome = loop.run()
        finally:
            unsent = loop.close()
        return {**outcome, "unsent_metrics": unsent}
    except (FatalTrainingError, TooManyProblemsError) as error:
        return {"fatal": str(error)}
    except DamagedCheckpointError as error:
        if not is_own:
            return {"fatal": f"{checkpoint} cannot be used: {error}"}
        return {"damaged": {checkpoint.rpartition("/")[2]: str(error)}}


# ---- in this process -------------------------------------------------------------------------------------------------


def train_here(job: WorkerJob, config: TrainingConfig, report: Callable[..., None] | None = None) -> dict[str, Any]:
    """Train from the newest checkpoint that is whole, in this process, as one worker of Ray would.

    Where PyTorch's default process group exists already, all its processes call this and are the workers of the run.
    """
    os.environ |= {"DEEPSPEED_LOG_LEVEL": "ERROR", **worker_environment(config)}
    import torch.distributed as dist
    from transformers.utils import logging

    logging.set_verbosity_error()  # what libraries say would be mixed with the bar
    logging.disable_progress_bar()
    if not dist.is_initialized():
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}  # DeepSpeed reads them
        backend = "nccl" if config.workers.use_gpu else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # which listens on no port
    context = WorkerContext(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        local_world_size=dist.get_world_size(),
        report=report or DirectoryReport(config),
        agree=agree,
        terminal=job.mailbox,
        reads_data=True,
    )
    return train_from_newest(job, context, directory=config.run.directory, checkpoint=start_checkpoint(config.run))


def agree(value: Any) -> Any:
    """Return what the first process passes."""
    import torch.distributed as dist

    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


class DirectoryReport:
    """Copies the parts of a checkpoint into the run's directory, and deletes the oldest checkpoints; see `WorkerContext`."""

    def __init__(self, config: TrainingConfig) -> None:
        self._run = config.run
        self._group = agree(uuid.uuid4().hex)

    def __call__(self, metrics: Mapping[str, float], directory: Path | None, *, step: int) -> None:
        """Store this rank's part; all ranks return when the checkpoint is whole."""
        if directory is None:
            return
        import torch.distributed as dist

        from jobs.engine.checkpoint import upload_part

        name, rank = checkpoint_name(step), dist.get_rank()
        uri = f"{self._run.directory}/{name}"
        upload_part(directory, uri, rank=rank, world_size=dist.get_world_size(), group=self._group)
        dist.barrier()
        if rank == 0:
            rating = metrics.get("rating")
            record_checkpoint(self._run.directory, name, num_kept=self._run.num_checkpoints_kept, rating=rating)
