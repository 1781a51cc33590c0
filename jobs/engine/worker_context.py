"""What the training loop knows of the processes around it: its rank, where its checkpoints go, and who asks it to stop.

The loop itself knows neither Ray nor a driver. `jobs.engine.ray_worker` makes the context of a worker of Ray Train.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


class Terminal(Protocol):
    """The terminal of the person who started the run, as a worker reaches it."""

    def say(self, line: str) -> None:
        """Print one line."""
        ...

    def show(self, step: int, text: str) -> None:
        """Show the progress after `step` steps, such as a bar; a text without bar goes through :meth:`say`."""
        ...

    def sign(self, rank: int, step: int, place: str) -> None:
        """Give a sign of life of a worker: how many steps it has made, and where it is."""
        ...

    def requests(self) -> tuple[bool, int] | None:
        """Return whether the run is to stop, and how often it was asked to save; None if nobody can be asked now."""
        ...


class Report(Protocol):
    """Takes over metrics and this rank's part of a checkpoint; all ranks call it for the same step."""

    def __call__(self, metrics: Mapping[str, float], directory: Path | None, *, step: int) -> None:
        """Report metrics, and store the directory as a part of the checkpoint of a step.

        Args:
            metrics: the scores of a validation after this step; empty if there was none.
            directory: local directory that this rank has written, which is deleted afterwards; None: no checkpoint.
            step: number of steps that the run has made.
        """
        ...


def _never() -> bool:
    return False


def _unchanged(value: Any) -> Any:
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerContext:
    """The place of one worker among all workers of a run. PyTorch's default process group must exist."""

    rank: int
    """Rank of this worker, from 0."""
    world_size: int
    """Number of workers."""
    local_world_size: int
    """Number of workers on this machine."""
    report: Report
    """Takes over metrics and checkpoints."""
    agree: Callable[[Any], Any] = _unchanged
    """Returns on all workers what the first one passes; all of them call it."""
    terminal: Terminal | None = None
    """The terminal of the person who started the run; None: there is none."""
    is_preempted: Callable[[], bool] = _never
    """Returns whether a machine of this run is about to be taken away."""

    def say(self, line: str) -> None:
        """Print one line on the terminal, or in this worker's log if there is none."""
        if self.terminal is None:
            print(line, flush=True)
        else:
            self.terminal.say(line)
