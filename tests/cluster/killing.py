"""Killing the workers of a training run in mid-run."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

from support import training_worker_pids, wait_for


def last_checkpoint(run: str | Path) -> int:
    """The step of the last checkpoint that Ray Train has noted in the directory of a run; 0: none."""
    snapshot = Path(run) / "checkpoint_manager_snapshot.json"
    names = re.findall(r"checkpoint-(\d{8})", snapshot.read_text()) if snapshot.exists() else []
    return max(map(int, names), default=0)


def kill_workers(cluster: dict[str, str]) -> set[int]:
    """All that train at the moment; their process ids."""
    pids = set(training_worker_pids(cluster))
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    return pids


def kill_workers_after_checkpoints(cluster: dict[str, str], run: str | Path, *, times: int) -> None:
    """Each time when they have written another checkpoint, so that they are at work and not about to start."""
    dead: set[int] = set()
    for _ in range(times):
        # A checkpoint may be noted when those that wrote it are gone already: it says nothing of those that follow.
        wait_for(lambda: not dead.issuperset(training_worker_pids(cluster)))
        step = last_checkpoint(run)
        wait_for(lambda step=step: last_checkpoint(run) > step)  # type: ignore[misc]
        dead.update(kill_workers(cluster))
