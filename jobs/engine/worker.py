"""The function that Ray Train calls in every worker; it receives the job as pickled bytes.

Ray's controller unpickles what it passes on to the workers. A job that is not packed into bytes would make the
controller import torch, Transformers and DeepSpeed, which it does not need and which would cost seconds at every start
and half a gigabyte of memory.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

from ray import cloudpickle


def pack_job(job: object) -> dict[str, Any]:
    """Pack a job into the settings that :func:`run_worker` takes."""
    return {"job": cloudpickle.dumps(job)}


def run_worker(settings: dict[str, Any]) -> dict[str, Any]:
    """Unpack the job and train to the end of the run.

    Returns:
        On rank 0, the outcome of the run; on every rank, `{"fatal": message}` if the run must not be restarted, or
        `{"damaged": {checkpoint: message}}` if it must continue from an older checkpoint.
    """
    import ray.train

    from jobs.engine.checkpoint import DamagedCheckpointError
    from jobs.engine.job import FatalTrainingError
    from pipelines.problems import TooManyProblemsError

    checkpoint = ray.train.get_checkpoint()
    try:
        with checkpoint.as_directory() if checkpoint else nullcontext() as directory:
            loop = cloudpickle.loads(settings["job"]).make_loop(Path(directory) if directory else None)
        try:
            outcome = loop.run()
        finally:
            unsent = loop.close()
        return {**outcome, "unsent_metrics": unsent}
    except (FatalTrainingError, TooManyProblemsError) as error:
        return {"fatal": str(error)}
    except DamagedCheckpointError as error:
        assert checkpoint is not None
        return {"damaged": {Path(checkpoint.path).name: str(error)}}


def export_worker(settings: dict[str, Any]) -> dict[str, Any]:
    """Unpack the job, load the checkpoint at the URI `checkpoint` of the settings, and write the task's export.

    Returns:
        An empty dictionary, or `{"fatal": message}` if the checkpoint cannot be used.
    """
    from ray.train import Checkpoint

    from jobs.engine.checkpoint import DamagedCheckpointError
    from jobs.engine.job import FatalTrainingError
    from jobs.engine.loop import TrainingLoop
    from pipelines.storage import resolve

    filesystem, path = resolve(settings["checkpoint"])
    try:
        with Checkpoint(path, filesystem).as_directory() as directory:
            loop = TrainingLoop(cloudpickle.loads(settings["job"]), Path(directory), reads_data=False)
        loop.task.export()
        loop.close()
    except (FatalTrainingError, DamagedCheckpointError) as error:
        return {"fatal": str(error)}
    return {}
