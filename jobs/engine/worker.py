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
from jobs.engine.resumption import find_resumption, write_record

if TYPE_CHECKING:  # Ray's controller unpickles these functions, and does not need what they import
    from jobs.engine.job import WorkerJob
    from jobs.engine.worker_context import WorkerContext


def pack_job(job: WorkerJob, *, directory: str, checkpoint: str) -> dict[str, Any]:
    """Pack a job into the settings that the functions below take.

    Args:
        job: the job.
        directory: path or URI of the run, which holds its checkpoints.
        checkpoint: path or URI of a checkpoint to load, unless the run has one of its own; empty for none.
    """
    return {"job": cloudpickle.dumps(job), "directory": directory, "checkpoint": checkpoint}


def run_worker(settings: dict[str, Any]) -> dict[str, Any]:
    """Unpack the job and train to the end of the run; see :func:`train_from_newest`."""
    collect_seldom()
    from jobs.engine.ray_worker import ray_context

    job = cloudpickle.loads(settings["job"])
    context = ray_context(job.mailbox, settings["directory"])
    return train_from_newest(job, context, directory=settings["directory"], checkpoint=settings["checkpoint"])


def train_from_newest(job: WorkerJob, context: WorkerContext, *, directory: str, checkpoint: str) -> dict[str, Any]:
    """Train to the end of the run, from its newest checkpoint that is whole; all workers call this.

    Args:
        job: what to train.
        context: this worker's place among the workers.
        directory: path or URI of the run.
        checkpoint: path or URI of the checkpoint to begin with if the run has none of its own; empty: begin at step 0.

    Returns:
        On rank 0, the outcome of the run; on every rank, `{"fatal": message}` if the run must not be restarted.
    """
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
    """Train to the end of the run; return also `{"damaged": {checkpoint: message}}` if one of its own is damaged."""
    from jobs.engine.checkpoint import DamagedCheckpointError
    from jobs.engine.job import FatalTrainingError
    from pipelines.problems import TooManyProblemsError

    try:
        with local_copy(checkpoint) if checkpoint else nullcontext() as local:
            try:
                loop = job.make_loop(context, Path(local) if local else None)
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
        if not is_own:
            return {"fatal": f"{checkpoint} cannot be used: {error}"}
        return {"damaged": {checkpoint.rpartition("/")[2]: str(error)}}


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
        with local_copy(settings["checkpoint"]) as directory:
            context = ray_context(job.mailbox, settings["directory"])
            loop = TrainingLoop(job, context, Path(directory), reads_data=False)
        loop.task.export()
        loop.close()
    except (FatalTrainingError, DamagedCheckpointError) as error:
        return {"fatal": str(error)}
    return {}


def local_copy(uri: str) -> Any:
    """Return a context manager for a local copy of the checkpoint at a path or URI, one for all workers of a node."""
    from ray.train import Checkpoint

    from pipelines.storage import resolve

    filesystem, path = resolve(uri)
    return Checkpoint(path, filesystem).as_directory()
