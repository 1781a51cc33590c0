"""Kill the workers of a training run while they train, and do other things at the same time."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from support import training_worker_pids, wait_for


def last_checkpoint(run: str | Path) -> int:
    """Return the step of the last checkpoint that is noted in the directory of a run; 0 if there is none."""
    record = Path(run) / "checkpoints.json"
    names = re.findall(r"checkpoint-(\d{8})", record.read_text()) if record.exists() else []
    return max(map(int, names), default=0)


def kill_workers(cluster: dict[str, str]) -> set[int]:
    """Kill all workers that train at the moment, and return their process IDs."""
    pids = set(training_worker_pids(cluster))
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    return pids


def kill_workers_after_checkpoints(cluster: dict[str, str], run: str | Path, *, times: int) -> None:
    """Kill the workers several times, each time after another checkpoint, so that they train and are not starting."""
    dead: set[int] = set()
    for _ in range(times):
        # A checkpoint may be noted after the workers that wrote it are dead. Therefore wait until new workers exist.
        wait_for(lambda: not dead.issuperset(training_worker_pids(cluster)))
        step = last_checkpoint(run)
        wait_for(lambda step=step: last_checkpoint(run) > step)  # type: ignore[misc]
        dead.update(kill_workers(cluster))


@contextmanager
def at_the_same_time(action: Callable[[], None]) -> Iterator[None]:
    """Run an action in a thread beside the block; if it raises an exception, raise that when the block has ended."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            action()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        thread.join()
        for error in errors:
            raise error
