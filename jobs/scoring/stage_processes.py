"""What the stages of a scoring job run in other processes: readers, workers of the pool, and writers.

With everything they hand on travels what they have counted of repeated requests to object stores (`pipelines.retries`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable
from typing import Any

import torch

from pipelines.retries import RETRIES


class Worker:
    """Ray actor of the pool: it builds the model when it gets its first item."""

    def __init__(self, build: Callable[[], Callable[[Any], Any]], num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        self._build = build
        self._model: Callable[[Any], Any] | None = None

    def run(self, read: tuple[Any, int]) -> tuple[Any, tuple[float, int]]:
        """Return the model's result for an item; and the seconds that it took, with what was counted of retries.

        Args:
            read: the item, with what was counted of retries while it was read, as `read_items` yields it.
        """
        item, retries = read
        RETRIES.add(retries)
        if self._model is None:  # Built here, not in __init__, so that an error is that of a unit.
            self._model = self._build()
        started = time.monotonic()
        result = self._model(item)
        return result, (time.monotonic() - started, RETRIES.take())


def read_items(read: Callable[[Any], Iterable[Any]], unit: Any) -> Generator[tuple[Any, int], None, None]:
    """Yield the items of a unit, each with what was counted of retries since the one before."""
    for item in read(unit):
        yield item, RETRIES.take()


def write_result(write: Callable[[Any], Any], result: Any) -> tuple[Any, int]:
    """Write a result, and return what the driver is to know of it, with what was counted of retries."""
    return write(result), RETRIES.take()
