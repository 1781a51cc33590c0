"""The order of data at full size: time and memory until a rank knows its first tasks, and when it resumes.

    .venv/bin/python -m benchmarks.data_order

No data are read: the sizes are those of CC12M (12.4 million pairs in 1 243 tars of img2dataset) and of OpenWebText2 (17
billion tokens in blocks of 1 024, in shards of 4 096 blocks, two shards a part). For each, a rank of eight asks for the
first segment of its tasks, at the beginning of the run and in the middle of the eighth epoch, and locates its items of
one batch.
"""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from pipelines.plan import StreamPlan
from pipelines.stream import Batch, RankStream

Result = TypeVar("Result")

NUM_PAIRS_PER_TAR, NUM_TARS = 10_000, 1_243
NUM_BLOCKS_PER_SHARD, NUM_PARTS = 4096, 2_026
_WORLD_SIZE = 8
_NUM_EPOCHS = 30


@dataclass(frozen=True)
class Places:
    """Source that returns where items lie instead of the items."""

    def read(self, shards: np.ndarray, rows: np.ndarray, epoch: int) -> Batch:
        """Return shards and rows."""
        return {"shard": shards, "row": rows, "digest": rows}

    def name(self, shard: int, row: int) -> str:
        """Return shard and row."""
        return f"{shard}/{row}"


def measure(action: Callable[[], Result]) -> tuple[Result, float, float]:
    """Return the result of an action, its seconds, and the largest number of MB that it had allocated."""
    tracemalloc.start()
    started = time.perf_counter()
    result = action()
    seconds = time.perf_counter() - started
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return result, seconds, peak / 1e6


def report(name: str, plan: StreamPlan, batch_size: int, num_batches_per_task: int | None) -> None:
    """Measure one data set and print a line for each place."""
    size = plan.num_items_per_epoch
    assert size is not None
    stop = _NUM_EPOCHS * size // batch_size * batch_size
    stream = RankStream(
        source=Places(),
        plan=plan,
        batch_size=batch_size,
        rank=3,
        world_size=_WORLD_SIZE,
        num_batches_per_task=num_batches_per_task,
    )
    for where, start in (("at the beginning", 0), ("resumed in epoch 8", int(7.5 * size) // batch_size * batch_size)):

        def begin(start: int = start) -> tuple[int, int]:
            segment = next(stream.segments(start, stop))
            batch = stream.read_places(segment.windows[0], np.arange(start, start + batch_size // _WORLD_SIZE))
            return len(segment.windows), len(batch["row"])

        (num_windows, num_items), seconds, megabytes = measure(begin)
        print(
            f"{name}, {size:,} items in {len(plan.shard_sizes):,} shards, {where}: {num_windows} windows listed and "
            f"{num_items} items located in {seconds:.2f} s with {megabytes:.1f} MB"
        )


def main() -> None:
    """Measure and print."""
    report(
        "CC12M",
        StreamPlan(shard_sizes=(NUM_PAIRS_PER_TAR,) * NUM_TARS, seed=0),
        batch_size=1024,
        num_batches_per_task=8,
    )
    report(
        "OpenWebText2",
        StreamPlan(shard_sizes=(NUM_BLOCKS_PER_SHARD,) * 2 * NUM_PARTS, part_sizes=(2,) * NUM_PARTS, seed=0),
        batch_size=512,
        num_batches_per_task=None,
    )


if __name__ == "__main__":
    main()
