"""Measures the speed of a run, and fetches its first batch ahead of time."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from pipelines.stream import Batch


class Pace:
    """Sums over steps: units (tokens, pairs), seconds, and the seconds of these spent waiting for data."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.seconds_waiting = 0.0
        self.num_units = 0

    def add(self, seconds: float, seconds_waiting: float, num_units: int) -> None:
        """Add one step to the sums."""
        self.seconds += seconds
        self.seconds_waiting += seconds_waiting
        self.num_units += num_units

    @property
    def units_per_second(self) -> float:
        """Units per second, counting the units of the global batch."""
        return self.num_units / self.seconds

    @property
    def data_wait_share(self) -> float:
        """Share of the time that was spent waiting for data."""
        return self.seconds_waiting / self.seconds


class Ahead:
    """An iterator that starts fetching its first item in the background as soon as it is created."""

    def __init__(self, items: Iterator[Batch]) -> None:
        self._items = items
        self._pool = ThreadPoolExecutor(1)
        self._first: Future[Batch] | None = self._pool.submit(next, items)

    def __next__(self) -> Batch:
        if self._first is None:
            return next(self._items)
        first, self._first = self._first.result(), None
        self._pool.shutdown()
        return first
