"""The functions that Ray Train calls in every worker; they receive the job as pickled bytes.

Ray's controller unpickles what it passes on to the workers. A job that is not packed into bytes would make the
controller import torch, Transformers and DeepSpeed, which it does not need and which would cost seconds at every start
and half a gigabyte of memory.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray import cloudpickle

from jobs.engine.garbage import collect_seldom

if TYPE_CHECKING:  # Ray's controller unpickles these functions, and does not need what they import
    from ray.train import Checkpoint

    from jobs.engine.job import WorkerJob
    from jobs.engine.worker_context import WorkerContext


def pack_job(job: object, *, checkpoint: str) -> dict[str, Any]:
    """Pack a job into the settings that the functions below take.

    Args:
        job: the job.
        checkpoint: path or URI of a checkpoint to load, unless the run has one of its own; empty for none.
    """
    return {"job": cloudpickle.dumps(job), "checkpoint": checkpoint}


def run_worker(settings: dict[str, Any]) -> dict[str, Any]:
    """Unpack the job and train to the end of the run; see :func:`run_loop`."""
    collect_seldom()
    import ray.train

    from jobs.engine.ray_worker import ray_context

    job = cloudpickle.loads(settings["job"])
    own = ray.train.get_checkpoint()
    return run_loop(job, ray_context(job.mailbox), checkpoint=own or settings["checkpoint"], is_own=own is not None)


def run_loop(job: WorkerJob, context: WorkerContext, *, checkpoint: Checkpoint | str, is_own: bool) -> dict[str, Any]:
    """Train to the end of the run.

    Args:
        job: what to train.
        context: this worker's place among the workers.
        checkpoint: the checkpoint to continue from, or its path or URI; empty: begin at step 0.
        is_own: whether the checkpoint is one of this run, and not of the run that it starts from.

    Returns:
        On rank 0, the outcome of the run; on every rank, `{"fatal": message}` if the run must not be restarted, or
        `{"damaged": {checkpoint: message}}` if it must continue from an older checkpoint.
    """
    from jobs.engine.checkpoint import DamagedCheckpointError
    from jobs.engine.job import FatalTrainingError
    from pipelines.problems import TooManyProblemsError

    opened = _open_checkpoint(checkpoint) if isinstance(checkpoint, str) and checkpoint else checkpoint or None
    try:
        with opened.as_directory() if opened else nullcontext() as directory:
            try:
                loop = job.make_loop(context, Path(directory) if directory else None)
            except ValueError as error:  # what the run is given does not fit, which no restart changes
                return {"fatal": str(error)}
        try:
            outcome = loop.run()
        finally:
            unsent = loop.close()
        return {**outcome, "unsent_metrics": unsent}
    except (FatalTrainingError, TooManyProblemsError) as error:
        return {"fatal": str(error)}
    except DamagedCheckpointError as error:
        assert opened is not None
        if not is_own:
            return {"fatal": f"{opened.path} cannot be used: {error}"}
        return {"damaged": {Path(opened.path).name: str(error)}}


def export_worker(settings: dict[str, Any]) -> dict[str, Any]:
    """Unpack the job, load the checkpoint of the settings, and write the task's export.

    Returns:
        An empty dictionary, or `{"fatal": message}` if the checkpoint cannot be used.
    """
    collect_seldom()
    from jobs.engine.checkpoint import DamagedCheckpointError
    from jobs.engine.job import FatalTrainingError
    from jobs.engine.loop import TrainingLoop
    from jobs.engine.ray_worker import ray_context

    job = cloudpickle.loads(settings["job"])
    try:
        with _open_checkpoint(settings["checkpoint"]).as_directory() as directory:
            loop = TrainingLoop(job, ray_context(job.mailbox), Path(directory), reads_data=False)
        loop.task.export()
        loop.close()
    except (FatalTrainingError, DamagedCheckpointError) as error:
        return {"fatal": str(error)}
    return {}


def _open_checkpoint(uri: str) -> Checkpoint:
    """Return the checkpoint at a path or URI."""
    from ray.train import Checkpoint

    from pipelines.storage import resolve

    filesystem, path = resolve(uri)
    return Checkpoint(path, filesystem)
