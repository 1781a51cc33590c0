"""What Ray Train calls in every worker; the job arrives as bytes.

Ray's controller unpickles what it passes on to the workers. Unpacked, a job would make it import torch, Transformers and
DeepSpeed, for which it has no use: seconds of every start, and half a gigabyte.
"""

from __future__ import annotations

from typing import Any

from ray import cloudpickle


def packed(job: object) -> dict[str, Any]:
    """The settings of :func:`run_worker`."""
    return {"job": cloudpickle.dumps(job)}


def run_worker(settings: dict[str, Any]) -> dict[str, Any]:
    """Train; see `jobs.engine.loop.train_worker`."""
    from jobs.engine.loop import train_worker

    return train_worker(cloudpickle.loads(settings["job"]))
