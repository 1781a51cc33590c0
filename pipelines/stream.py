"""Streaming: a Ray Data pipeline that gives one rank its blocks of every batch, in the order of the plan.

One task a window: it reads the window's shards once and yields this rank's blocks a few batches at a time. Ray Data runs
ahead of the consumer within its memory budget and keeps the order; the cursor is the place that is passed in.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import ray.data
from ray.data import DataContext

from pipelines.manifest import Manifest, read_blocks
from pipelines.packing import unpack_blocks
from pipelines.plan import StreamPlan, Window, rank_places

Batch = dict[str, np.ndarray]

_NUM_BATCHES_PER_OUTPUT = 16
# Logical CPUs that one rank's reading takes beside its training.
READ_CPUS = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStream:
    """One rank's part of the batches of a run."""

    manifest: Manifest
    plan: StreamPlan
    batch_size: int
    """Blocks in the global batch."""
    rank: int
    world_size: int

    def __post_init__(self) -> None:
        if self.batch_size % self.world_size:
            raise ValueError(
                f"batch_size = {self.batch_size} is not divisible by the {self.world_size} workers: choose a multiple"
            )

    @property
    def num_blocks_per_rank(self) -> int:
        """Blocks of one batch that this rank gets."""
        return self.batch_size // self.world_size

    def batches(self, start: int, stop: int) -> Iterator[Batch]:
        """This rank's part of the batches that cover the places start … stop−1, through Ray Data.

        Each batch holds `input_ids`, `position_ids`, `targets` (n, T), and `place` and `digest` (n,).

        Args:
            start: the cursor, a multiple of the batch size.
            stop: the end of the run, a multiple of the batch size.
        """
        assert start % self.batch_size == 0
        assert stop % self.batch_size == 0
        windows = list(self.plan.windows(start, stop))
        if not windows:
            return

        def read(row: Batch) -> Iterator[Batch]:
            for index in row["window"]:
                yield from self.read_window(windows[int(index)], start, stop)

        context = DataContext.get_current()
        context.enable_progress_bars = False
        # Training may pause for as long as a validation takes; that is no reason to give the stream up.
        context.execution_no_progress_timeout_s = 7 * 24 * 3600
        context.execution_options.preserve_order = True
        tasks = [{"window": index} for index in range(len(windows))]
        # One task at a time is enough to stay ahead: what it yields is prefetched while it reads on.
        dataset = ray.data.from_items(tasks, override_num_blocks=len(tasks)).map_batches(
            read, batch_size=1, num_cpus=READ_CPUS, concurrency=1
        )
        yield from dataset.iter_batches(batch_size=self.num_blocks_per_rank, batch_format="numpy", prefetch_batches=4)

    def read_window(self, window: Window, start: int, stop: int) -> Iterator[Batch]:
        """This rank's blocks of one window, in order, several batches at a time."""
        places = rank_places(
            max(start, window.start),
            min(stop, window.stop),
            batch_size=self.batch_size,
            rank=self.rank,
            world_size=self.world_size,
        )
        size = _NUM_BATCHES_PER_OUTPUT * self.num_blocks_per_rank
        for at in range(0, len(places), size):
            yield self.read_places(window, places[at : at + size])

    def read_places(self, window: Window, places: np.ndarray) -> Batch:
        """The blocks at these places of a window, as training arrays."""
        shards, rows = self.plan.blocks(window, places)
        tables, order = [], []
        for shard in np.unique(shards):
            chosen = np.flatnonzero(shards == shard)
            tables.append(read_blocks(self.manifest, self.manifest.shards[shard], rows[chosen]))
            order.append(chosen)
        table = pa.concat_tables(tables).take(pa.array(np.argsort(np.concatenate(order))))
        return block_arrays(self.manifest, table) | {"place": places}

    def keys(self, places: Iterable[int]) -> list[str]:
        """Names of the blocks at these places, for messages: shard file, row, archive and first document."""
        names = []
        for place in places:
            window = next(iter(self.plan.windows(place, place + 1)))
            shard, row = (int(value[0]) for value in self.plan.blocks(window, [place]))
            entry = self.manifest.shards[shard]
            document = read_blocks(self.manifest, entry, [row]).column("document")[0].as_py()
            names.append(f"{entry.file}:{row} (document {document} of {entry.archive})")
        return names


def block_arrays(manifest: Manifest, table: pa.Table) -> Batch:
    """Training arrays of stored blocks, with a digest of each block's tokens: (n,) int64, non-negative, below 2^48."""
    arrays: dict[str, Any] = unpack_blocks(table, manifest.packing)
    digests = [
        int.from_bytes(hashlib.blake2b(row.tobytes(), digest_size=6).digest(), "little") for row in arrays["input_ids"]
    ]
    return arrays | {"digest": np.array(digests, dtype=np.int64)}


def read_range(manifest: Manifest, start: int, stop: int) -> Batch:
    """Blocks start … stop−1 in the stored order, without Ray: for validation."""
    tables, first = [], 0
    for shard in manifest.shards:
        low, high = max(start - first, 0), min(stop - first, shard.num_blocks)
        if low < high:
            tables.append(read_blocks(manifest, shard, range(low, high)))
        first += shard.num_blocks
    return block_arrays(manifest, pa.concat_tables(tables))
