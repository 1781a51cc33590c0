"""Keep Ray Data's scheduling loop from taking the computing time of the training process that it runs in."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, ClassVar, TypeVar

Item = TypeVar("Item")


class Patience:
    """Ray Data execution callback that slows down Ray Data's scheduling loop while training does not wait for data.

    The loop runs in a thread of the training process. Once the read-ahead has filled its memory budget, a reader's
    output is ready but must not be taken yet, and the loop polls for it hundreds of times a second. That costs half
    of a worker's computing time and holds Python's global interpreter lock, which training needs too (benchmarks/README.md).
    """

    SECONDS: ClassVar[float] = 0.05
    """Minimum duration of a step of the loop in seconds, unless a batch is being waited for."""
    is_awaited: ClassVar = threading.Event()
    """Set while someone in this process waits for a batch."""

    @classmethod
    def hold(cls, batches: Iterator[Item]) -> Iterator[Item]:
        """Yield the batches; Ray Data's loop is slow while none is awaited."""
        cls.is_awaited.set()
        for batch in batches:
            cls.is_awaited.clear()
            yield batch
            cls.is_awaited.set()

    def before_execution_starts(self, executor: Any) -> None:
        """Do nothing; Ray Data requires this method."""

    def on_execution_step(self, executor: Any) -> None:
        """Wait after each step of the loop, until a batch is awaited or SECONDS have passed."""
        self.is_awaited.wait(self.SECONDS)

    def after_execution_succeeds(self, executor: Any) -> None:
        """Do nothing; Ray Data requires this method."""

    def after_execution_fails(self, executor: Any, error: Exception) -> None:
        """Do nothing; Ray Data requires this method."""
