"""Says when a run makes no step for a minute, which worker is to blame, and where each of them stands.

A worker can hang without any error: stopped by a debugger or a signal, in a read from a dead mount, or in a collective
operation that another worker never reaches. Every worker therefore tells the driver from a thread of its own how many steps
it has made and in which function its main thread is. A worker that is stopped tells nothing.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from jobs.engine.worker_context import Terminal

_SECONDS_BETWEEN_SIGNS = 5.0
_SECONDS_TO_STALL = 60.0
_SECONDS_TO_BE_SILENT = 4 * _SECONDS_BETWEEN_SIGNS
_MAX_WORKERS_NAMED = 8
_OURS = str(Path(__file__).parents[2])

Sign = tuple[int, str, float]
"""Number of steps, the place of the main thread, and the age in seconds of a worker's last sign of life."""


class SignsOfLife:
    """Tells the driver every few seconds from a thread where this worker's main thread is.

    Args:
        terminal: the driver's terminal; None: nobody is told.
        rank: rank of this worker.
        step: returns the number of steps that it has made.
    """

    def __init__(self, terminal: Terminal | None, rank: int, step: Callable[[], int]) -> None:
        self._closed = threading.Event()
        # Ray runs a worker's code in a thread of its own, which makes this call.
        self._watched = threading.get_ident()
        if terminal is not None:
            arguments = (terminal, rank, step)
            threading.Thread(target=self._run, args=arguments, name="signs of life", daemon=True).start()

    def close(self) -> None:
        """Tell nothing any more."""
        self._closed.set()

    def _run(self, terminal: Terminal, rank: int, step: Callable[[], int]) -> None:
        while not self._closed.wait(_SECONDS_BETWEEN_SIGNS):
            terminal.sign(rank, step(), place_of(self._watched))


def place_of(thread: int) -> str:
    """Return function, file and line of the innermost call of a thread in code of this project, and what it has called."""
    frame = innermost = sys._current_frames().get(thread)
    while frame is not None and not frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    if innermost is None:
        return "nowhere"
    own = frame or innermost
    called = "" if own is innermost else f", in {innermost.f_code.co_name}"
    return f"{own.f_code.co_name} ({Path(own.f_code.co_filename).name}:{own.f_lineno}){called}"


class StallWatch:
    """Looks at the workers' signs of life, and describes a run that makes no step: after a minute, two, four, and so on."""

    def __init__(self) -> None:
        self._steps: Mapping[int, int] = {}
        self._since = time.monotonic()
        self._next = _SECONDS_TO_STALL

    def look(self, signs: Mapping[int, Sign], now: float | None = None) -> tuple[float, str]:
        """Return for how many seconds no worker has made a step, and a line for the user; empty if none is due.

        Args:
            signs: rank → the last sign of life.
            now: the time by the monotonic clock; None: now.
        """
        moment = time.monotonic() if now is None else now
        steps = {rank: step for rank, (step, _, _) in signs.items()}
        if steps != self._steps:
            self._steps, self._since, self._next = steps, moment, _SECONDS_TO_STALL
        waited = moment - self._since
        if waited < self._next or not signs:
            return waited, ""
        self._next *= 2
        return waited, f"no step for {waited:.0f} s, after step {max(steps.values())}: {describe_signs(signs)}"


def describe_signs(signs: Mapping[int, Sign]) -> str:
    """Describe where the workers stand, those first that give no sign."""
    silent = [
        f"worker {rank} has given no sign for {age:.0f} s (last in {place})"
        for rank, (_, place, age) in sorted(signs.items())
        if age > _SECONDS_TO_BE_SILENT
    ]
    others = [
        f"worker {rank} is in {place}"
        for rank, (_, place, age) in sorted(signs.items())
        if age <= _SECONDS_TO_BE_SILENT
    ]
    told = silent + others
    more = f"; and {len(told) - _MAX_WORKERS_NAMED} more" if len(told) > _MAX_WORKERS_NAMED else ""
    return "; ".join(told[:_MAX_WORKERS_NAMED]) + more
