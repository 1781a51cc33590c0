"""Streaming: a Ray Data pipeline that gives one rank its items of every batch, in the order of the plan.

A task reads this rank's items of a window, or of a few batches of it, and yields them some batches at a time. Ray Data
runs ahead of the consumer within its memory budget and keeps the order; the cursor is the place that is passed in. What is
in memory already is read without it, in the same order.
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

# Logical CPUs that one reader of a rank takes beside its training.
READ_CPUS = 0.25


class Source(Protocol):
    """What is streamed: items that lie in rows of shards."""

    def read(self, shards: np.ndarray, rows: np.ndarray, epoch: int) -> Batch:
        """The items at (shard, row) (n,) each, in this order, as they are in this epoch: arrays with n rows.

        One array is `digest` (n,) int64: of what the item holds, non-negative, below 2^48.
        """
        ...

    def name(self, shard: int, row: int) -> str:
        """What an item is called in messages."""
        ...


class Patience:
    """Holds Ray Data's loop back while training has what it needs.

    The loop runs in a thread of the training process. Once as much is read ahead as there is memory for, what a reader
    yields is ready and may not be taken, and the loop asks for it again at once, hundreds of times a second: half of the
    computing of a worker, and Python's lock, which training needs too (docs/log.md).
    """

    SECONDS: ClassVar[float] = 0.05
    """That a step of the loop takes at least, unless a batch is waited for."""
    is_awaited: ClassVar = threading.Event()
    """Somebody in this process waits for a batch."""

    def before_execution_starts(self, executor: Any) -> None:
        """Nothing to do."""

    def on_execution_step(self, executor: Any) -> None:
        """After each step."""
        self.is_awaited.wait(self.SECONDS)

    def after_execution_succeeds(self, executor: Any) -> None:
        """Nothing to do."""

    def after_execution_fails(self, executor: Any, error: Exception) -> None:
        """Nothing to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStream:
    """One rank's part of the batches of a run."""

    source: Source
    plan: StreamPlan
    batch_size: int
    """Items in the global batch."""
    rank: int
    world_size: int
    num_readers: int = 1
    """Tasks that read at a time: one is enough to stay ahead where items are only copied, not decoded. 0: none, the rank
    reads by itself what its source holds in memory."""
    num_batches_per_task: int | None = None
    """None: a task reads a whole window."""
    num_batches_per_output: int = 16
    """What a task yields at a time."""

    def __post_init__(self) -> None:
        if self.batch_size % self.world_size:
            raise ValueError(
                f"batch_size = {self.batch_size} is not divisible by the {self.world_size} workers: choose a multiple"
            )

    @property
    def num_items_per_rank(self) -> int:
        """Items of one batch that this rank gets."""
        return self.batch_size // self.world_size

    def batches(self, start: int, stop: int) -> Iterator[Batch]:
        """This rank's part of the batches that cover the places start … stop−1.

        Each batch holds what the source gives, and `place` (n,).

        Args:
            start: the cursor, a multiple of the batch size.
            stop: the end of the run, a multiple of the batch size.
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
        # Training may pause for as long as a validation takes; that is no reason to give the stream up.
        context.execution_no_progress_timeout_s = 7 * 24 * 3600
        context.execution_options.preserve_order = True
        context.custom_execution_callback_classes = [Patience]  # type: ignore[list-item]  # Ray's own base class is internal
        # What a task yields is prefetched while it reads on.
        dataset = ray.data.from_items(tasks, override_num_blocks=len(tasks)).map_batches(
            read, batch_size=1, num_cpus=READ_CPUS, concurrency=self.num_readers
        )
        Patience.is_awaited.set()
        for batch in dataset.iter_batches(batch_size=self.num_items_per_rank, batch_format="numpy", prefetch_batches=4):
            Patience.is_awaited.clear()
            yield batch
            Patience.is_awaited.set()

    def _read_batch(self, windows: list[Window], first: int) -> Batch:
        """This rank's part of the batch that begins at a place; it may run across the end of a window."""
        stop = first + self.batch_size
        parts = [
            self.read_places(window, places)
            for window in windows
            if window.start < stop and window.stop > first and len(places := self._places(window, first, stop))
        ]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def _places(self, window: Window, start: int, stop: int) -> np.ndarray:
        """This rank's places of start … stop−1 that lie in the window, in order."""
        return rank_places(
            max(start, window.start),
            min(stop, window.stop),
            batch_size=self.batch_size,
            rank=self.rank,
            world_size=self.world_size,
        )

    def _parts(self, places: np.ndarray, num_batches: int | None) -> Iterator[np.ndarray]:
        """The places, at most so many batches' worth at a time."""
        size = len(places) if num_batches is None else num_batches * self.num_items_per_rank
        for at in range(0, len(places), max(size, 1)):
            yield places[at : at + size]

    def read_places(self, window: Window, places: np.ndarray) -> Batch:
        """The items at these places of a window."""
        shards, rows = self.plan.locate(window, places)
        return self.source.read(shards, rows, window.epoch) | {"place": places}

    def names(self, places: Iterable[int]) -> list[str]:
        """Names of the items at these places, for messages."""
        names = []
        for place in places:
            window = next(iter(self.plan.windows(place, place + 1)))
            shard, row = (int(value[0]) for value in self.plan.locate(window, [place]))
            names.append(self.source.name(shard, row))
        return names
