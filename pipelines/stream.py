"""Stream training data with Ray Data: one rank receives its items of every batch, in the order of the `StreamPlan`.

Each Ray task reads this rank's items of one window, or of a few batches of a window, and yields several batches at a
time. Ray Data reads ahead of the consumer within its memory budget and preserves the order. A run is resumed by
passing its cursor (the next place) as `start`. Sources that hold their data in memory are read without Ray Data, in
the same order.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
import ray.data
from ray.data import DataContext

from pipelines.plan import StreamPlan, Window, rank_places

Batch = dict[str, np.ndarray]

# Logical CPUs that Ray reserves for each reading task of a rank, which runs beside the rank's training process.
READ_CPUS = 0.25


class Source(Protocol):
    """Data that can be streamed: items stored as rows of shards."""

    def read(self, shards: np.ndarray, rows: np.ndarray, epoch: int) -> Batch:
        """Return n items as arrays with n rows each.

        Args:
            shards, rows: (n,) shard number of each item, and its row in the shard; the result has the same order.
            epoch: epoch in which the items are visited; the content may depend on it, for example through augmentation.

        Returns:
            Arrays by name. One of them is `digest` (n,) int64, a hash of each item's content in [0, 2^48).
        """
        ...

    def name(self, shard: int, row: int) -> str:
        """Return a name for an item that helps a person find it, for messages."""
        ...


class Patience:
    """Ray Data execution callback that slows down Ray Data's scheduling loop while training does not wait for data.

    The loop runs in a thread of the training process. Once the read-ahead has filled its memory budget, a reader's
    output is ready but must not be taken yet, and the loop polls for it hundreds of times a second. That costs half
    of a worker's computing time and holds Python's global interpreter lock, which training needs too (docs/log.md).
    """

    SECONDS: ClassVar[float] = 0.05
    """Minimum duration of a step of the loop in seconds, unless a batch is being waited for."""
    is_awaited: ClassVar = threading.Event()
    """Set while someone in this process waits for a batch."""

    def before_execution_starts(self, executor: Any) -> None:
        """Do nothing; Ray Data requires this method."""

    def on_execution_step(self, executor: Any) -> None:
        """Wait after each step of the loop, until a batch is awaited or SECONDS have passed."""
        self.is_awaited.wait(self.SECONDS)

    def after_execution_succeeds(self, executor: Any) -> None:
        """Do nothing; Ray Data requires this method."""

    def after_execution_fails(self, executor: Any, error: Exception) -> None:
        """Do nothing; Ray Data requires this method."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStream:
    """One rank's part of the batches of a run.

    Raises:
        ValueError: if the batch size is not divisible by the number of workers.
    """

    source: Source
    """Data to read from."""
    plan: StreamPlan
    """Order of the items."""
    batch_size: int
    """Number of items in the global batch, over all ranks."""
    rank: int
    """Rank of this worker, from 0."""
    world_size: int
    """Number of workers."""
    num_readers: int = 1
    """Number of Ray tasks that read at the same time. One is enough if items are only copied, not decoded. With 0 there
    are no tasks: the rank reads in its own process, for a source that is held in memory."""
    num_batches_per_task: int | None = None
    """Number of batches that one task reads; if None, a task reads a whole window."""
    num_batches_per_output: int = 16
    """Number of batches that a task yields at a time."""

    def __post_init__(self) -> None:
        if self.batch_size % self.world_size:
            raise ValueError(
                f"batch_size = {self.batch_size} is not divisible by the {self.world_size} workers: choose a multiple"
            )

    @property
    def num_items_per_rank(self) -> int:
        """Number of items of each batch that this rank receives."""
        return self.batch_size // self.world_size

    def batches(self, start: int, stop: int) -> Iterator[Batch]:
        """Yield this rank's part of each batch in the places start … stop−1.

        Each batch holds the arrays that the source returns, and `place` (n,), the place of each item in the stream.

        Args:
            start: the cursor, which is the first place to read; a multiple of the batch size.
            stop: the place at which the run ends (exclusive); a multiple of the batch size.
        """
        assert start % self.batch_size == 0
        assert stop % self.batch_size == 0
        windows = list(self.plan.windows(start, stop))
        if self.num_readers == 0:
            for first in range(start, stop, self.batch_size):
                yield self._read_batch(windows, first)
            return
        if not windows:
            return
        tasks = [
            {"window": index, "first": int(part[0]), "last": int(part[-1])}
            for index, window in enumerate(windows)
            for part in self._parts(self._places(window, start, stop), self.num_batches_per_task)
        ]

        def read(row: Batch) -> Iterator[Batch]:
            for index, first, last in zip(row["window"], row["first"], row["last"], strict=True):
                window = windows[int(index)]
                places = self._places(window, int(first), int(last) + 1)
                for part in self._parts(places, self.num_batches_per_output):
                    yield self.read_places(window, part)

        context = DataContext.get_current()
        context.enable_progress_bars = False
        # Training may pause for a long time, for example during validation; Ray Data must not abort the stream then.
        context.execution_no_progress_timeout_s = 7 * 24 * 3600
        context.execution_options.preserve_order = True
        context.custom_execution_callback_classes = [Patience]  # type: ignore[list-item]  # Ray's own base class is internal
        # The batches that a task has yielded are prefetched while the task continues to read.
        dataset = ray.data.from_items(tasks, override_num_blocks=len(tasks)).map_batches(
            read, batch_size=1, num_cpus=READ_CPUS, concurrency=self.num_readers
        )
        Patience.is_awaited.set()
        for batch in dataset.iter_batches(batch_size=self.num_items_per_rank, batch_format="numpy", prefetch_batches=4):
            Patience.is_awaited.clear()
            yield batch
            Patience.is_awaited.set()

    def _read_batch(self, windows: list[Window], first: int) -> Batch:
        """Return this rank's part of the batch that begins at place `first`; a batch may cross the end of a window."""
        stop = first + self.batch_size
        parts = [
            self.read_places(window, places)
            for window in windows
            if window.start < stop and window.stop > first and len(places := self._places(window, first, stop))
        ]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def _places(self, window: Window, start: int, stop: int) -> np.ndarray:
        """Return the places in start … stop−1 that belong to this rank and lie in the window, in order."""
        return rank_places(
            max(start, window.start),
            min(stop, window.stop),
            batch_size=self.batch_size,
            rank=self.rank,
            world_size=self.world_size,
        )

    def _parts(self, places: np.ndarray, num_batches: int | None) -> Iterator[np.ndarray]:
        """Yield the places in pieces of at most `num_batches` batches of this rank, or all at once if it is None."""
        size = len(places) if num_batches is None else num_batches * self.num_items_per_rank
        for at in range(0, len(places), max(size, 1)):
            yield places[at : at + size]

    def read_places(self, window: Window, places: np.ndarray) -> Batch:
        """Read the items at these places of a window; the result also holds the places, as `place` (n,)."""
        shards, rows = self.plan.locate(window, places)
        return self.source.read(shards, rows, window.epoch) | {"place": places}

    def names(self, places: Iterable[int]) -> list[str]:
        """Return the names of the items at these places, for messages."""
        names = []
        for place in places:
            window = next(iter(self.plan.windows(place, place + 1)))
            shard, row = (int(value[0]) for value in self.plan.locate(window, [place]))
            names.append(self.source.name(shard, row))
        return names
