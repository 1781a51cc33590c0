"""How fast a run goes, and its data fetched ahead."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from pipelines.stream import Batch


class Pace:
    """Units (tokens, pairs) and seconds over some steps, and how much of the time went by waiting for data."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.seconds_waiting = 0.0
        self.num_units = 0

    def add(self, seconds: float, seconds_waiting: float, num_units: int) -> None:
        """Count one step."""
        self.seconds += seconds
        self.seconds_waiting += seconds_waiting
        self.num_units += num_units

    @property
    def units_per_second(self) -> float:
        """Of the global batch."""
        return self.num_units / self.seconds

    @property
    def data_wait_share(self) -> float:
        """Of the time."""
        return self.seconds_waiting / self.seconds


class Ahead:
    """An iterator whose first item is fetched in the background from the moment it is made."""

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
