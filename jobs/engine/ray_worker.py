"""The context of a worker that Ray Train started: its checkpoints go to Ray Train, its messages to the driver's mailbox.

Ray Train merges the directories of all ranks on upload, in the background.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch
from ray.actor import ActorHandle
from ray.train import Checkpoint, CheckpointUploadMode
from ray.train.v2._internal.execution.context import get_train_context

from jobs.engine.checkpoint_files import write_file_list
from jobs.engine.failures import DiskFullError, naming_full_disk, naming_refused_write
from jobs.engine.resumption import checkpoint_name
from jobs.engine.worker_context import WorkerContext


def ray_context(mailbox: ActorHandle | None) -> WorkerContext:
    """Return the context of this worker of Ray Train, and make the GPU that it was given PyTorch's current one.

    Args:
        mailbox: the driver's mailbox (`jobs.engine.console`); None: nobody sees what the workers say.
    """
    if (device := ray.train.torch.get_device()).type == "cuda":
        torch.cuda.set_device(device)
    context = ray.train.get_context()
    rank, world_size = context.get_world_rank(), context.get_world_size()
    return WorkerContext(
        rank=rank,
        world_size=world_size,
        local_world_size=context.get_local_world_size(),
        report=partial(_report, rank=rank, world_size=world_size),
        terminal=None if mailbox is None else DriverTerminal(mailbox),
        is_preempted=lambda: get_train_context().preemption_context.preemption_info is not None,
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

    def requests(self) -> tuple[bool, int] | None:
        """Return what the driver and Ray Train's controller have asked; None if they do not answer."""
        try:
            asked: tuple[bool, int] = ray.get(self._mailbox.requests.remote(), timeout=30)
        except ray.exceptions.RayError:
            return None  # the driver may be gone, and then this worker will be soon
        return asked


def _report(metrics: Mapping[str, float], directory: Path, *, step: int, rank: int, world_size: int) -> None:
    """Report this rank's part of a checkpoint to Ray Train, which uploads it in the background."""
    ray.train.report(
        dict(metrics),
        checkpoint=Checkpoint.from_directory(str(directory)),
        checkpoint_dir_name=checkpoint_name(step),
        checkpoint_upload_mode=CheckpointUploadMode.ASYNC,
        checkpoint_upload_fn=partial(_upload, rank=rank, world_size=world_size),
        delete_local_checkpoint_after_upload=True,
    )


def _upload(checkpoint: Checkpoint, name: str, *, rank: int, world_size: int) -> Checkpoint:
    """List this rank's files and copy them into the run's directory; Ray Train calls this in the background."""
    storage = ray.train.get_context().get_storage()
    # Workers share a placement group exactly if they were started together.
    group = ray.get_runtime_context().get_placement_group_id() or ""
    try:
        with naming_full_disk(checkpoint.path):
            write_file_list(Path(checkpoint.path), rank=rank, world_size=world_size, group=group)
        place = storage.build_checkpoint_path_from_name(name)
        with naming_full_disk(place), naming_refused_write(storage.storage_filesystem, place):
            return storage.persist_current_checkpoint(checkpoint, name)
    except DiskFullError:  # Ray Train tries again after some other errors
        shutil.rmtree(checkpoint.path, ignore_errors=True)
        raise
