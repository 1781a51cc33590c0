"""The function that Ray Train calls in every worker; it receives the job as pickled bytes.

Ray's controller unpickles what it passes on to the workers. A job that is not packed into bytes would make the
controller import torch, Transformers and DeepSpeed, which it does not need and which would cost seconds at every start
and half a gigabyte of memory.
"""

from __future__ import annotations

from typing import Any

from ray import cloudpickle


def packed(job: object) -> dict[str, Any]:
    """Pack a job into the settings that :func:`run_worker` takes."""
    return {"job": cloudpickle.dumps(job)}


def run_worker(settings: dict[str, Any]) -> dict[str, Any]:
    """Unpack the job and train; see `jobs.engine.loop.train_worker`."""
    from jobs.engine.loop import train_worker

    return train_worker(cloudpickle.loads(settings["job"]))
