"""The context of a worker that Ray Train started: its checkpoints go to Ray Train, its messages to the driver's mailbox.

All workers write their parts of a checkpoint into one directory, in the background.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.collective
import ray.train.torch
import torch
from pyarrow.fs import LocalFileSystem
from ray.actor import ActorHandle
from ray.train import Checkpoint, CheckpointUploadMode

from jobs.engine.checkpoint import upload_part
from jobs.engine.ray_private import is_preempted
from jobs.engine.resumption import checkpoint_name
from jobs.engine.worker_context import WorkerContext
from pipelines.storage import exists, resolve


def ray_context(mailbox: ActorHandle | None, run_directory: str) -> WorkerContext:
    """Return the context of this worker of Ray Train, and make the GPU that it was given PyTorch's current one.

    Args:
        mailbox: the driver's mailbox (`jobs.engine.console`); None: nobody sees what the workers say.
        run_directory: path or URI of the run, for its checkpoints.
    """
    if (device := ray.train.torch.get_device()).type == "cuda":
        torch.cuda.set_device(device)
    context = ray.train.get_context()
    return WorkerContext(
        rank=context.get_world_rank(),
        world_size=context.get_world_size(),
        local_world_size=context.get_local_world_size(),
        report=RayReport(run_directory, rank=context.get_world_rank(), world_size=context.get_world_size()),
        agree=ray.train.collective.broadcast_from_rank_zero,
        terminal=None if mailbox is None else DriverTerminal(mailbox),
        is_preempted=is_preempted,
    )


class DriverTerminal:
    """The driver's terminal, which polls its mailbox; see `jobs.engine.worker_context.Terminal`."""

    def __init__(self, mailbox: Any) -> None:
        self._mailbox = mailbox

    def say(self, line: str) -> None:
        """Print one line."""
        self._mailbox.say.remote(line)

    def show(self, step: int, text: str) -> None:
        """Draw the bar after `step` steps."""
        self._mailbox.show.remote(step, text)

    def sign(self, rank: int, step: int, place: str) -> None:
        """Give a sign of life of a worker."""
        self._mailbox.sign.remote(rank, step, place)

    def requests(self) -> tuple[bool, int] | None:
        """Return what the driver and Ray Train's controller have asked; None if they do not answer."""
        try:
            asked: tuple[bool, int] = ray.get(self._mailbox.requests.remote(), timeout=30)
        except ray.exceptions.RayError:
            return None  # the driver may be gone, and then this worker will be soon
        return asked


class RayReport:
    """Reports metrics and this rank's part of a checkpoint to Ray Train; see `jobs.engine.worker_context.Report`."""

    def __init__(self, run_directory: str, *, rank: int, world_size: int) -> None:
        self._run_directory, self._rank, self._world_size = run_directory, rank, world_size

    def __call__(self, metrics: Mapping[str, float], directory: Path | None, *, step: int) -> None:
        """Report in the background, so that training goes on while the checkpoint is uploaded."""
        checkpoint = None if directory is None else Checkpoint.from_directory(str(directory))
        ray.train.report(
            {"step": step, **metrics},
            checkpoint=checkpoint,
            checkpoint_dir_name=checkpoint_name(step),
            checkpoint_upload_mode=CheckpointUploadMode.ASYNC,
            checkpoint_upload_fn=partial(self._upload, failed=[]),
        )

    def _upload(self, checkpoint: Checkpoint, name: str, *, failed: list[Exception]) -> Checkpoint:
        """Copy this rank's files into the run's directory, and delete them here; Ray Train calls this in the background.

        Args:
            checkpoint: the local directory.
            name: name of the checkpoint.
            failed: the error of an earlier attempt. Ray Train repeats some uploads that failed; the store was asked often
                enough by then, and the files are deleted.
        """
        if failed:
            raise failed[0]
        filesystem, path = resolve(f"{self._run_directory}/{name}")
        # Workers share a placement group exactly if they were started together.
        group = ray.get_runtime_context().get_placement_group_id() or ""
        try:
            upload_part(
                Path(checkpoint.path),
                f"{self._run_directory}/{name}",
                rank=self._rank,
                world_size=self._world_size,
                group=group,
            )
            if isinstance(filesystem, LocalFileSystem) and not exists(f"{self._run_directory}/configuration.json"):
                raise FileNotFoundError(
                    f"the node of worker {self._rank} does not see {self._run_directory}: give run.storage a directory or "
                    "URI that all nodes share"
                )
        except Exception as error:
            failed.append(error)
            raise
        return Checkpoint(path, filesystem)
