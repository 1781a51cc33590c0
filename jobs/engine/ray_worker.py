"""A worker that Ray Train started: its checkpoints go to Ray Train, its messages to the driver's mailbox.

All workers write their parts of a checkpoint into one directory, in the background. Ray's controller imports this module,
and does not need torch, Transformers and DeepSpeed, which would cost seconds at every start and half a gigabyte of memory.
So nothing here imports them at the top, and the job is passed through it as pickled bytes.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from pyarrow.fs import LocalFileSystem
from ray import cloudpickle
from ray.train import Checkpoint

from jobs.engine.console import Fetched, Mailbox
from jobs.engine.resumption import checkpoint_name
from pipelines.actor_start import on_this_node, wait_until_started
from pipelines.storage import exists, resolve

if TYPE_CHECKING:
    from jobs.engine.worker import WorkerContext, WorkerJob


def pack_job(job: WorkerJob, *, directory: str, checkpoint: str) -> dict[str, Any]:
    """Pack a job into the settings that the functions below take."""
    return {"job": cloudpickle.dumps(job), "directory": directory, "checkpoint": checkpoint}


def run_worker(settings: dict[str, Any]) -> dict[str, Any]:
    """Unpack the job and train to the end of the run."""
    gc.set_threshold(100_000)  # as `jobs.engine.command_line.run_job` does
    from jobs.engine.worker import train_from_newest

    job = cloudpickle.loads(settings.pop("job"))
    return train_from_newest(job, ray_context(job, settings["directory"]), **settings)


def export_worker(settings: dict[str, Any]) -> dict[str, Any]:
    """Unpack the job, load the checkpoint of the settings, and write the task's export."""
    gc.set_threshold(100_000)  # as `jobs.engine.command_line.run_job` does
    from jobs.engine.worker import export_checkpoint

    job = cloudpickle.loads(settings["job"])
    return export_checkpoint(job, ray_context(job, settings["directory"]), checkpoint=settings["checkpoint"])


def ray_context(job: WorkerJob, run_directory: str) -> WorkerContext:
    """Return the context of this worker, and make the GPU that it was given PyTorch's current one."""
    import torch
    from ray.train.collective import broadcast_from_rank_zero
    from ray.train.torch import get_device

    from jobs.engine.ray_private import is_preempted
    from jobs.engine.worker import WorkerContext

    if (device := get_device()).type == "cuda":
        torch.cuda.set_device(device)
    context = ray.train.get_context()
    return WorkerContext(
        rank=context.get_world_rank(),
        world_size=context.get_world_size(),
        local_world_size=context.get_local_world_size(),
        report=RayReport(run_directory, rank=context.get_world_rank(), world_size=context.get_world_size()),
        agree=broadcast_from_rank_zero,
        terminal=job.mailbox,
        is_preempted=is_preempted,
    )


class RemoteMailbox:
    """A `jobs.engine.console.Mailbox` in a small Ray actor, as the driver, the controller and the workers reach it.

    Ray's own forwarding of worker output would mix it with the log messages of every library.
    """

    def __init__(self) -> None:
        mailbox: Any = ray.remote(Mailbox)
        self._actor = mailbox.options(num_cpus=0, scheduling_strategy=on_this_node()).remote()

    def say(self, line: str) -> None:
        """Print one line."""
        self._actor.say.remote(line)

    def show(self, step: int, text: str) -> None:
        """Draw the bar after `step` steps."""
        self._actor.show.remote(step, text)

    def sign(self, rank: int, step: int, place: str) -> None:
        """Give a sign of life of a worker."""
        self._actor.sign.remote(rank, step, place)

    def ask_to_save(self) -> None:
        """Ask the workers to save."""
        self._actor.ask_to_save.remote()

    def ask_to_stop(self) -> None:
        """Ask the workers to save and to stop."""
        self._actor.ask_to_stop.remote()

    def requests(self) -> tuple[bool, int] | None:
        """Return what the driver and Ray Train's controller have asked; None if they do not answer."""
        return self._ask("requests", seconds=30.0)

    def wait(self) -> None:
        """Wait until the actor runs."""
        wait_until_started(self._actor)

    def fetch(self) -> Fetched | None:
        """Return what has come since the last call; None if the actor does not answer."""
        return self._ask("fetch", seconds=10.0)

    def close(self) -> None:
        """End the actor: the packed job holds a handle too, so that Ray would keep it as long as this process lives."""
        with suppress(ray.exceptions.RayError):
            ray.kill(self._actor)

    def _ask(self, method: str, *, seconds: float) -> Any:
        try:
            return ray.get(getattr(self._actor, method).remote(), timeout=seconds)
        except ray.exceptions.RayError:
            return None  # the cluster is shutting down; the job itself reports why


class RayReport:
    """Reports metrics and this rank's part of a checkpoint to Ray Train; see `jobs.engine.worker.Report`."""

    def __init__(self, run_directory: str, *, rank: int, world_size: int) -> None:
        self._run_directory, self._rank, self._world_size = run_directory, rank, world_size

    def __call__(self, metrics: Mapping[str, float], directory: Path | None, *, step: int) -> None:
        """Report in the background, so that training goes on while the checkpoint is uploaded."""
        from ray.train import CheckpointUploadMode

        ray.train.report(
            {"step": step, **metrics},
            checkpoint=None if directory is None else Checkpoint.from_directory(str(directory)),
            checkpoint_dir_name=checkpoint_name(step),
            checkpoint_upload_mode=CheckpointUploadMode.ASYNC,
            checkpoint_upload_fn=partial(self._upload, failed=[]),
        )

    def _upload(self, checkpoint: Checkpoint, name: str, *, failed: list[Exception]) -> Checkpoint:
        """Copy this rank's files into the run's directory, and delete them here; Ray Train calls this in the background."""
        from jobs.engine.checkpoint import upload_part

        if failed:
            raise failed[0]
        uri = f"{self._run_directory}/{name}"
        filesystem, path = resolve(uri)
        # Workers share a placement group exactly if they were started together.
        group = ray.get_runtime_context().get_placement_group_id() or ""
        try:
            upload_part(Path(checkpoint.path), uri, rank=self._rank, world_size=self._world_size, group=group)
            if isinstance(filesystem, LocalFileSystem) and not exists(f"{self._run_directory}/configuration.json"):
                raise FileNotFoundError(
                    f"the node of worker {self._rank} does not see {self._run_directory}: give run.storage a directory or "
                    "URI that all nodes share"
                )
        except Exception as error:
            failed.append(error)
            raise
        return Checkpoint(path, filesystem)
