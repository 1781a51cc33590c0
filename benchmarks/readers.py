"""One execution of Ray Data for every rank of a node, or one fleet of readers that serves all of them.

    .venv/bin/python -m benchmarks.readers [--ranks 2] [--num-rounds 3]

The ranks are processes of one node, which read as fast as they can and do nothing else. In the form "a rank" every one
of them reads its part of every batch by its own `RankStream`, as training does. In the form "a node" one process reads
whole batches by a `RankStream` with as many readers as the ranks have together, divides them, and every rank gets its
part, through Ray's object store, a few batches ahead. Both yield the same batches (their digests are compared). Shown are
items per second of all ranks together after the first batch, the seconds to the first batch, the computing time of all
processes of the Ray cluster per thousand items, and the memory of the ranks and of the process that divides batches.
"""

from __future__ import annotations

import collections
import logging
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import ray
import tyro

from benchmarks.image_pipeline import generate, prepare
from benchmarks.text_preparation import seconds_of_children
from jobs.engine.cluster import listen_on_loopback
from pipelines.images.pairs import PairSource
from pipelines.plan import StreamPlan
from pipelines.stream import RankStream, Source
from pipelines.text.blocks import BlockSource
from pipelines.text.packing import PackingConfig
from pipelines.text.prepare import PrepareConfig, prepare_text
from pipelines.text.tokenization import load_tokenizer, train_bpe

_NUM_BATCHES_AHEAD = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """What to measure."""

    ranks: int = 2
    num_rounds: int = 3
    num_images: int = 1024
    num_blocks: int = 16_384
    text: str = "data/sample/text/train"
    tokenizer: str = "data/sample/tokenizer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How one kind of data is read."""

    source: Source
    plan: StreamPlan
    batch_size: int
    num_items: int
    num_readers: int
    """Number of readers of every rank."""
    options: dict[str, Any]
    """Further fields of the streams."""

    def stream(self, rank: int, world_size: int, num_readers: int) -> RankStream:
        """Return the stream of a rank."""
        return RankStream(
            source=self.source, plan=self.plan, batch_size=self.batch_size, rank=rank, world_size=world_size,
            num_readers=num_readers, **self.options,
        )  # fmt: skip


@ray.remote(num_cpus=0)
class Fleet:
    """Reads whole batches and gives every rank its part of them, in order."""

    def begin(self, reading: Reading, num_ranks: int) -> None:
        """Begin to read."""
        self._num_ranks = num_ranks
        stream = reading.stream(0, 1, reading.num_readers * num_ranks)
        self._batches = stream.batches(0, reading.num_items)

    def next(self) -> list[Any]:
        """Return references to the parts of the next batch; an empty list at the end."""
        batch = next(self._batches, None)
        if batch is None:
            return []
        size = len(batch["place"]) // self._num_ranks
        return [
            ray.put({name: value[rank * size : (rank + 1) * size] for name, value in batch.items()})
            for rank in range(self._num_ranks)
        ]

    def memory(self) -> int:
        """Return the resident bytes of this process."""
        return psutil.Process().memory_info().rss


@ray.remote(num_cpus=0)
class Dispenser:
    """Hands out the batches of a fleet, each to every rank once, whichever rank asks first."""

    def begin(self, fleet: Any, num_ranks: int) -> None:
        """Begin to ask the fleet for batches, a few ahead."""
        self._fleet = fleet
        self._parts: list[Any] = []
        self._first = 0  # number of the batch that `_parts` begins with
        self._taken = [0] * num_ranks
        self._ahead = collections.deque(fleet.next.remote() for _ in range(_NUM_BATCHES_AHEAD))

    def take(self, rank: int) -> list[Any]:
        """Return a list with the reference to the next part of a rank; empty at the end."""
        number = self._taken[rank]
        self._taken[rank] += 1
        while number - self._first >= len(self._parts):
            self._parts.append(ray.get(self._ahead.popleft()))
            self._ahead.append(self._fleet.next.remote())
        parts = self._parts[number - self._first]
        done = min(self._taken) - self._first
        self._parts, self._first = self._parts[done:], self._first + done
        return [parts[rank]] if parts else []


@ray.remote(num_cpus=0)
class Rank:
    """A rank that takes batches and does nothing with them."""

    def read(self, reading: Reading, rank: int, num_ranks: int, dispenser: Any) -> tuple[float, float, int, int]:
        """Return the times of the first and the last batch, the sum of the digests, and the resident bytes."""
        first, digest = 0.0, 0
        for batch in self._batches(reading, rank, num_ranks, dispenser):
            first = first or time.time()
            digest = (digest * 31 + int(batch["digest"].sum()) + int(np.sum(batch["place"]))) % 2**61
        return first, time.time(), digest, psutil.Process().memory_info().rss

    def _batches(self, reading: Reading, rank: int, num_ranks: int, dispenser: Any) -> Iterator[Any]:
        if dispenser is None:
            yield from reading.stream(rank, num_ranks, reading.num_readers).batches(0, reading.num_items)
            return
        waiting = collections.deque(dispenser.take.remote(rank) for _ in range(_NUM_BATCHES_AHEAD))
        while part := ray.get(waiting.popleft()):
            waiting.append(dispenser.take.remote(rank))
            yield ray.get(part[0])


@dataclass(frozen=True, slots=True)
class Actors:
    """The processes of both forms, which stay from round to round, so that what they import is not measured."""

    ranks: list[Any]
    fleet: Any
    dispenser: Any

    @classmethod
    def start(cls, num_ranks: int) -> Actors:
        """Start them."""
        ranks = [Rank.remote() for _ in range(num_ranks)]  # type: ignore[attr-defined]  # Ray's decorator adds it
        return cls(ranks, Fleet.remote(), Dispenser.remote())  # type: ignore[attr-defined]


def measure(reading: Reading, actors: Actors, *, is_fleet: bool) -> tuple[float, float, float, float, list[int]]:
    """Return items per second, seconds to the first batch, CPU seconds per 1 000 items, megabytes, and the digests."""
    ranks = actors.ranks
    before, started = seconds_of_children(), time.time()
    if is_fleet:
        ray.get(actors.fleet.begin.remote(reading, len(ranks)))
        ray.get(actors.dispenser.begin.remote(actors.fleet, len(ranks)))
    dispenser = actors.dispenser if is_fleet else None
    results = ray.get([one.read.remote(reading, at, len(ranks), dispenser) for at, one in enumerate(ranks)])
    first, last = max(result[0] for result in results), max(result[1] for result in results)
    used = seconds_of_children() - before
    num_bytes = sum(result[3] for result in results) + (ray.get(actors.fleet.memory.remote()) if is_fleet else 0)
    speed = (reading.num_items - reading.batch_size) / (last - first)
    digests = [result[2] for result in results]
    return speed, first - started, 1000 * used / reading.num_items, num_bytes / 1e6, digests


def readings(arguments: Arguments, scratch: Path) -> Iterator[tuple[str, Reading]]:
    """Prepare both kinds of data, and yield how they are read."""
    layout = PackingConfig.for_tokenizer(load_tokenizer(arguments.tokenizer), 128)
    text = prepare_text(PrepareConfig(source=arguments.text, tokenizer=arguments.tokenizer), layout, str(scratch / "t"))
    size = 64 * arguments.ranks
    yield (
        "blocks of text",
        Reading(
            source=BlockSource(manifest=text), plan=text.plan(seed=0, window_size=4096), batch_size=size,
            num_items=arguments.num_blocks // size * size, num_readers=1, options={},
        ),
    )  # fmt: skip
    (scratch / "data").mkdir()
    (scratch / "pairs").mkdir()
    generate(scratch / "data", arguments.num_images, 256)
    pairs = prepare(str(scratch / "data"), str(scratch / "pairs"))
    tokenizer = train_bpe([f"word{number}" for number in range(200)], 512)
    tokenizer.pad_token = tokenizer.eos_token
    size = 32 * arguments.ranks
    yield (
        "images and captions",
        Reading(
            source=PairSource(manifest=pairs, tokenizer=tokenizer, image_size=224),
            plan=StreamPlan(shard_sizes=pairs.shard_sizes, seed=0, window_size=512), batch_size=size,
            num_items=2 * arguments.num_images // size * size, num_readers=1,
            options={"num_batches_per_task": 8, "num_batches_per_output": 1},
        ),
    )  # fmt: skip


def main(arguments: Arguments) -> None:
    """Measure both forms in turn, and print."""
    print(f"{platform.machine()}, {os.cpu_count()} cores, ray {ray.__version__}, {arguments.ranks} ranks", flush=True)
    os.environ.setdefault("RAY_worker_niceness", "0")  # as `jobs.engine.cluster` sets it
    listen_on_loopback()
    ray.init(
        address="local", num_cpus=2 * arguments.ranks, include_dashboard=False, log_to_driver=False,
        logging_level=logging.ERROR,
    )  # fmt: skip
    actors = Actors.start(arguments.ranks)
    with tempfile.TemporaryDirectory() as scratch:
        for name, reading in readings(arguments, Path(scratch)):
            rows: dict[bool, list[tuple[float, ...]]] = {False: [], True: []}
            for number in range(arguments.num_rounds + 1):
                found = {is_fleet: measure(reading, actors, is_fleet=is_fleet) for is_fleet in rows}
                assert found[False][4] == found[True][4], "the two forms do not yield the same batches"
                for is_fleet, row in found.items():
                    if number:  # In the first round Ray's workers start.
                        rows[is_fleet].append(row[:4])
            for is_fleet, measured in rows.items():
                speed, first, used, memory = (statistics.median(column) for column in zip(*measured, strict=True))
                print(
                    f"{name}, one execution {'a node' if is_fleet else 'a rank'}: {speed:,.0f} items/s, first batch after "
                    f"{first:.2f} s, {used:.2f} CPU s per 1 000 items, {memory:,.0f} MB",
                    flush=True,
                )
            ratios = [fleet[0] / own[0] for own, fleet in zip(rows[False], rows[True], strict=True)]
            print(
                f"{name}: a node / a rank {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})",
                flush=True,
            )


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
