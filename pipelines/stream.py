"""Stream training data with Ray Data: one rank receives its items of every batch, in the order of the `StreamPlan`.

Each Ray task reads this rank's items of one window, or of a few batches of a window, and yields several batches at a
time. Ray Data reads ahead of the consumer within its memory budget and preserves the order. A run is resumed by
passing its cursor (the next place) as `start`. Sources that hold their data in memory are read without Ray Data, in
the same order, and so are all others where Ray is not running.
"""

from __future__ import annotations

import hashlib
import itertools
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

import numpy as np

from pipelines.plan import ShuffleWindow, StreamPlan, rank_places
from pipelines.store_errors import RETRIES

Batch = dict[str, np.ndarray]


def row_digests(rows: Iterable[bytes]) -> np.ndarray:
    """Return 48-bit hashes (n,), int64, of the bytes of n items, by which batches are compared."""
    hashes = [int.from_bytes(hashlib.blake2b(row, digest_size=6).digest(), "little") for row in rows]
    return np.array(hashes, dtype=np.int64)


Item = TypeVar("Item")

# Logical CPUs that Ray reserves for each reading task of a rank, which runs beside the rank's training process.
READ_CPUS = 0.25
# A segment ends with the first window at which it has this many tasks. Starting an execution takes a few tenths of a
# second, in the background.
_NUM_TASKS_PER_SEGMENT = 512
# Share of a window during which the one before stays in the node's cache, because readers of other ranks may be behind.
_SHARE_KEPT = 0.25
# Array with which a task sends what it has counted of repeated requests; it is taken out of the batches.
_RETRIES = "retries"


class Source(Protocol):
    """Data that can be streamed: items stored as rows of shards.

    A source whose shards may lie in an object store also has `prefetch(now, later, before)`, which fetches shards into the
    node's cache in the background: those of the window that is read `now`, then of the next one. Those of `before`, which
    another rank may still read, are not fetched, but do not make room for those that are.
    """

    def read(self, shards: np.ndarray, rows: np.ndarray, epoch: int) -> Batch:
        """Return n items as arrays with n rows each, in the order of `shards` and `rows` (n,).

        The content may depend on the epoch, for example through augmentation. One of the arrays is `digest` (n,) int64, a
        hash of each item's content in [0, 2^48).
        """
        ...

    def name(self, shard: int, row: int) -> str:
        """Return a name for an item that helps a person find it, for messages."""
        ...


class Segment(NamedTuple):
    """Consecutive batches, which one execution of Ray Data reads, so that the list of its tasks is bounded."""

    start: int
    stop: int
    windows: list[ShuffleWindow]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStream:
    """One rank's part of the batches of a run."""

    source: Source
    plan: StreamPlan
    batch_size: int
    """Number of items in the global batch, over all ranks."""
    rank: int
    world_size: int
    num_readers: int = 1
    """Number of Ray tasks that read at the same time. One is enough if items are only copied, not decoded. With 0 there
    are no tasks: the rank reads in its own process, for a source that is held in memory."""
    num_batches_per_task: int | None = None
    """Number of batches that one task reads; if None, a task reads a whole window."""
    num_batches_per_output: int = 16
    """Number of batches that a task yields at a time."""
    reader_resources: Mapping[str, float] = field(default_factory=dict)
    """Custom Ray resources that a reading task takes, by which the tasks are kept to certain nodes."""

    def __post_init__(self) -> None:
        if self.batch_size % self.world_size:
            raise ValueError(
                f"batch_size = {self.batch_size} is not divisible by the {self.world_size} workers: choose a multiple"
            )

    @property
    def num_items_per_rank(self) -> int:
        """Number of items of each batch that this rank receives."""
        return self.batch_size // self.world_size

    def batches(self, start: int, stop: int, *, in_this_process: bool = False) -> Iterator[Batch]:
        """Yield this rank's part of each batch in the places start … stop−1, which are multiples of the batch size.

        Each batch holds the arrays that the source returns, and `place` (n,), the place of each item in the stream. They are
        read by tasks of Ray; in this process if Ray does not run, or if `in_this_process` asks for it and neither data that
        are still being prepared nor certain nodes need tasks.
        """
        assert start % self.batch_size == 0
        assert stop % self.batch_size == 0
        segments = self.segments(start, stop)
        has_ray = "ray" in sys.modules and sys.modules["ray"].is_initialized()
        needs_tasks = self.plan.is_growing or bool(self.reader_resources)
        if self.num_readers and has_ray and (needs_tasks or not in_this_process):
            yield from SchedulingThrottle.hold(self._stream(segments))
        else:
            for segment in segments:
                for first in range(segment.start, segment.stop, self.batch_size):
                    yield self._read_batch(segment.windows, first)

    def segments(self, start: int, stop: int) -> Iterator[Segment]:
        """Yield the segments of the places start … stop−1, in order; a segment holds whole batches."""
        windows: list[ShuffleWindow] = []
        num_tasks = 0
        for window in self.plan.windows(start, stop):
            windows.append(window)
            num_tasks += 1 if self.num_batches_per_task is None else window.num_items // self.batch_size + 1
            whole = min(stop, window.stop // self.batch_size * self.batch_size)
            if whole > start and (self.plan.is_growing or num_tasks >= _NUM_TASKS_PER_SEGMENT):
                yield Segment(start, whole, windows)
                start, num_tasks = whole, 0
                windows = [window] if window.stop > whole else []  # A batch may cross the end of a window.
        if start < stop:
            yield Segment(start, stop, windows)

    def _stream(self, segments: Iterator[Segment]) -> Iterator[Batch]:
        """Yield the batches of the segments, each of which begins to be read before the one before it has ended."""

        def begin() -> tuple[int, Iterator[Batch]]:
            segment = next(segments, None)
            if segment is None:
                return 0, iter(())
            batches = self._read_segment(segment)
            return (segment.stop - segment.start) // self.batch_size, itertools.chain([next(batches)], batches)

        pool = ThreadPoolExecutor(1, thread_name_prefix="next-segment")
        try:
            upcoming = pool.submit(begin)
            while True:
                num_batches, batches = upcoming.result()
                if not num_batches:
                    return
                for number, batch in enumerate(batches):
                    if number == num_batches * 3 // 4:
                        upcoming = pool.submit(begin)
                    yield batch
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _read_segment(self, segment: Segment) -> Iterator[Batch]:
        """Yield the batches of a segment, which are read by an execution of Ray Data."""
        windows = segment.windows
        tasks = [
            {"window": index, "first": int(part[0]), "last": int(part[-1])}
            for index, window in enumerate(windows)
            for part in self._parts(self._places(window, segment.start, segment.stop), self.num_batches_per_task)
        ]

        def read(row: Batch) -> Iterator[Batch]:
            for index, first, last in zip(row["window"], row["first"], row["last"], strict=True):
                window = windows[int(index)]
                places = self._places(window, int(first), int(last) + 1)
                for part in self._parts(places, self.num_batches_per_output):
                    self._prefetch(windows, int(index), int(part[0]))
                    batch = self.read_places(window, part)
                    retries = np.zeros(len(part), dtype=np.int64)  # a row for every item; the first one has the number
                    retries[:1] = RETRIES.take()
                    yield batch | {_RETRIES: retries}

        import ray.data  # Here, because a run that reads in its own process need not import it.

        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        # Training may pause for a long time, for example during validation; Ray Data must not abort the stream then.
        context.execution_no_progress_timeout_s = 7 * 24 * 3600
        context.execution_options.preserve_order = True
        context.custom_execution_callback_classes = [SchedulingThrottle]  # type: ignore[list-item]  # Ray's own base class is internal
        # The batches that a task has yielded are prefetched while the task continues to read.
        dataset = ray.data.from_items(tasks, override_num_blocks=len(tasks)).map_batches(
            read,
            batch_size=1,
            num_cpus=READ_CPUS,
            concurrency=self.num_readers,
            resources=dict(self.reader_resources),
        )
        for batch in dataset.iter_batches(batch_size=self.num_items_per_rank, batch_format="numpy", prefetch_batches=4):
            RETRIES.add(int(batch.pop(_RETRIES).sum()))
            yield batch

    def _prefetch(self, windows: list[ShuffleWindow], index: int, place: int) -> None:
        """Have the window of a place and the next one fetched; at first the window before is kept for slower ranks."""
        if prefetch := getattr(self.source, "prefetch", None):
            window = windows[index]
            is_kept = index > 0 and place < window.start + _SHARE_KEPT * window.num_items
            later = windows[index + 1].shards if index + 1 < len(windows) else ()
            prefetch(window.shards, later, windows[index - 1].shards if is_kept else ())

    def _read_batch(self, windows: list[ShuffleWindow], first: int) -> Batch:
        """Return this rank's part of the batch that begins at place `first`; a batch may cross the end of a window."""
        stop = first + self.batch_size
        parts = []
        for index, window in enumerate(windows):
            if window.start < stop and window.stop > first and len(places := self._places(window, first, stop)):
                self._prefetch(windows, index, int(places[0]))
                parts.append(self.read_places(window, places))
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def _places(self, window: ShuffleWindow, start: int, stop: int) -> np.ndarray:
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

    def read_places(self, window: ShuffleWindow, places: np.ndarray) -> Batch:
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


class SchedulingThrottle:
    """Ray Data execution callback that slows down Ray Data's scheduling loop while training does not wait for data.

    The loop runs in a thread of the training process. Once the read-ahead has filled its memory budget, a reader's
    output is ready but must not be taken yet, and the loop polls for it hundreds of times a second. That costs half
    of a worker's computing time and holds Python's global interpreter lock, which training needs too.
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

    def _do_nothing(self, *_: object) -> None:
        """Ray Data requires these methods."""

    before_execution_starts = after_execution_succeeds = after_execution_fails = _do_nothing

    def on_execution_step(self, executor: Any) -> None:
        """Wait after each step of the loop, until a batch is awaited or SECONDS have passed."""
        self.is_awaited.wait(self.SECONDS)
