"""Trains in this process, without Ray: checkpoints go straight into the run's directory.

Several processes train together if PyTorch's process group connects them. The files are those of a run on Ray, and either
can continue the other's run. Ray starts workers, finds room for them and restarts them; nothing of that is done here.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow.fs
import torch.distributed as dist

from jobs.engine.checkpoint_files import write_file_list
from jobs.engine.config import TrainingConfig
from jobs.engine.failures import naming_full_disk
from jobs.engine.job import WorkerJob
from jobs.engine.resumption import checkpoint_name, find_resumption, whole_checkpoints, write_snapshot
from jobs.engine.start import start_checkpoint
from jobs.engine.worker import run_loop
from jobs.engine.worker_context import Terminal, WorkerContext
from pipelines.storage import resolve


def train_locally(
    job: WorkerJob, config: TrainingConfig, *, rank: int = 0, world_size: int = 1, terminal: Terminal | None = None
) -> dict[str, Any]:
    """Train from the newest checkpoint that is whole, and return what `jobs.engine.worker.run_loop` does.

    All processes of the run call this; PyTorch's default process group must exist.

    Args:
        job: what to train.
        config: configuration of the run.
        rank: rank of this process.
        world_size: number of processes.
        terminal: where progress is shown; None: lines are printed.
    """
    damaged: dict[str, str] = {}
    context = WorkerContext(
        rank=rank,
        world_size=world_size,
        local_world_size=world_size,
        report=DirectoryReport(config, rank=rank, world_size=world_size),
        terminal=terminal,
    )
    while True:
        resumption = find_resumption(config.run.directory, damaged)
        own = f"{config.run.directory}/{resumption.checkpoints[-1]}" if resumption.checkpoints else ""
        dist.barrier()  # No rank writes a checkpoint before all of them have looked for the newest one.
        result = run_loop(job, context, checkpoint=own or start_checkpoint(config.run), is_own=bool(own))
        if "damaged" not in result:
            return result
        damaged |= result["damaged"]


class DirectoryReport:
    """Copies the parts of a checkpoint into the run's directory, and deletes the oldest checkpoints; see `Report`."""

    def __init__(self, config: TrainingConfig, *, rank: int, world_size: int) -> None:
        self._run, self._rank, self._world_size = config.run, rank, world_size
        group = [uuid.uuid4().hex]
        dist.broadcast_object_list(group)
        (self._group,) = group

    def __call__(self, metrics: Mapping[str, float], directory: Path, *, step: int) -> None:
        """Store this rank's part; all ranks return when the checkpoint is whole."""
        filesystem, place = resolve(f"{self._run.directory}/{checkpoint_name(step)}")
        try:
            with naming_full_disk(place):
                write_file_list(directory, rank=self._rank, world_size=self._world_size, group=self._group)
                filesystem.create_dir(place, recursive=True)
                pyarrow.fs.copy_files(str(directory), place, destination_filesystem=filesystem)
        finally:
            shutil.rmtree(directory, ignore_errors=True)
        dist.barrier()
        if self._rank == 0:
            *old, newest = whole_checkpoints(self._run.directory)
            kept = [*old[len(old) + 1 - self._run.num_checkpoints_kept :], newest]
            write_snapshot(self._run.directory, kept)  # from which Ray Train would continue
            for name in set(old) - set(kept):
                filesystem.delete_dir(resolve(f"{self._run.directory}/{name}")[1])
