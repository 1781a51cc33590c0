"""Count the requests to object stores that were repeated because the store failed, and say so.

Every process counts its own (`RETRIES`). The count of a reading task travels with its next batch (`pipelines.stream`),
that of a preparing task with its result (`pipelines.prepare`), and that of a scoring job with its rows
(`jobs/scoring/units.py`), to the process that asked for it, which adds it to its own. So it arrives where a person
can see it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

SECONDS_BETWEEN_LINES = 60.0
"""Least number of seconds between two lines about repeated requests."""


class Retries:
    """Number of repeated requests: those of this process, and those that it has received from others."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_waiting = 0
        self._num_total = 0

    def __reduce__(self) -> str:
        """Pickle `RETRIES` by its name: functions that are sent to another process count there."""
        return "RETRIES"

    @property
    def num_total(self) -> int:
        """Number of all repeated requests so far."""
        return self._num_total

    def add(self, number: int = 1) -> None:
        """Count requests that are repeated here, or what `take` has returned in another process."""
        with self._lock:
            self._num_waiting += number
            self._num_total += number

    def take(self) -> int:
        """Return the number that was counted since the last call, so that it is counted once."""
        with self._lock:
            taken, self._num_waiting = self._num_waiting, 0
        return taken


RETRIES = Retries()
"""The repeated requests that this process knows of."""


class RetryLog:
    """Adds up repeated requests, and says at most once a minute what is new.

    Args:
        say: function that shows a line to a person.
        total: number that was counted before, for example before a run was restarted.
        clock: function that returns the time in seconds.
    """

    def __init__(
        self, say: Callable[[str], None], total: int = 0, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._say, self._clock = say, clock
        self._said_at: float | None = None
        self._num_said = total
        self.total = total
        """Number of all repeated requests."""

    def add(self, number: int) -> None:
        """Add what `Retries.take` has returned, which may be 0, and say what is new if the minute is over."""
        self.total += number
        if self._said_at is None or self._clock() - self._said_at >= SECONDS_BETWEEN_LINES:
            self.close()

    def close(self) -> None:
        """Say what was not said yet."""
        if self.total > self._num_said:
            self._say(describe_retries(self.total - self._num_said, self.total))
            self._said_at, self._num_said = self._clock(), self.total


def describe_retries(number: int, total: int) -> str:
    """Describe a number of new repeated requests, of a total so far, in one line."""
    return f"requests to an object store failed and were repeated: {number}; {total} so far"
