"""Test how much computing time a stream takes from the process that trains on it, what it fetches ahead, and
that what its tasks count of repeated requests arrives."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from ray.data import DataContext, ExecutionResources

from jobs.engine.cluster import check_placement
from pipelines.patience import Patience
from pipelines.plan import StreamPlan
from pipelines.recorded_tasks import run_recorded_tasks
from pipelines.retries import RETRIES
from pipelines.stream import Batch, RankStream

pytestmark = pytest.mark.cluster


@dataclass(frozen=True)
class Zeros:
    """Reads items that are 1 MiB of zeros each."""

    def read(self, shards: np.ndarray, rows: np.ndarray, epoch: int) -> Batch:
        return {"digest": rows, "x": np.zeros((len(rows), 1 << 18), dtype=np.float32)}

    def name(self, shard: int, row: int) -> str:
        return f"{shard}/{row}"


def test_rays_loop_rests_while_all_memory_is_full_of_what_was_read_ahead(
    cluster: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[float] = []
    rest = Patience.on_execution_step

    def counted(self: Patience, executor: Any) -> None:
        steps.append(time.monotonic())
        rest(self, executor)

    monkeypatch.setattr(Patience, "on_execution_step", counted)
    options = DataContext.get_current().execution_options
    monkeypatch.setattr(options, "resource_limits", ExecutionResources(object_store_memory=32 << 20))
    batch_size = 4
    stream = RankStream(
        source=Zeros(),
        plan=StreamPlan(shard_sizes=(200,), seed=0),
        batch_size=batch_size,
        rank=0,
        world_size=1,
        num_batches_per_task=8,
        num_batches_per_output=1,
    )
    places = []
    for number, batch in enumerate(stream.batches(0, 200)):
        places += batch["place"].tolist()
        if number == 3:
            # While the consumer computes, a step of Ray Data's loop takes at least 50 ms, however fast the machine is.
            begun = time.monotonic()
            time.sleep(3)
            during = [at for at in steps if begun < at < begun + 3]
            assert 1 <= len(during) <= 3 / Patience.SECONDS + 2
    assert places == list(range(200))


@dataclass
class Asked:
    """Returns with every item which shards were said to be needed before it was read."""

    asked: tuple[int, ...] = ()

    def read_ahead(self, now: Sequence[int], later: Sequence[int], before: Sequence[int]) -> None:
        self.asked = (*now, *(later or (-1,)), *(before or (-1,)))

    def read(self, shards: np.ndarray, rows: np.ndarray, epoch: int) -> Batch:
        return {"digest": rows, "shard": shards, "asked": np.tile(self.asked, (len(rows), 1))}

    def name(self, shard: int, row: int) -> str:
        return f"{shard}/{row}"


@pytest.mark.parametrize("num_batches_per_task", [1, None])
def test_a_stream_fetches_its_window_and_the_next_one_ahead_and_keeps_the_one_before_for_a_quarter(
    cluster: dict[str, str], num_batches_per_task: int | None
) -> None:
    plan = StreamPlan(shard_sizes=(16,) * 5, seed=0, window_size=16)
    stream = RankStream(
        source=Asked(), plan=plan, batch_size=2, rank=0, world_size=1, num_batches_per_task=num_batches_per_task,
        num_batches_per_output=1,
    )  # fmt: skip
    order = [window.shards[0] for window in plan.windows(0, 128)]
    found = [(int(batch["shard"][0]), *batch["asked"][0].tolist()) for batch in stream.batches(0, 128)]
    assert found == [
        (now, now, later, before if batch < 2 else -1)
        for before, now, later in zip([-1, *order], order, [*order[1:], -1], strict=False)
        for batch in range(8)
    ]


HEAD = "node:__internal_head__"
"""A custom resource that every Ray has, 1 of it on one node; it stands for one that a person gives to nodes that read."""


def amount_taken() -> float:
    """Return how much of the custom resource the task has that this is called in."""
    amount: float = ray.get_runtime_context().get_assigned_resources().get(HEAD, 0.0)
    return amount


class Places:
    """Reads items that tell how much of the custom resource the reading task has."""

    def read(self, shards: np.ndarray, rows: np.ndarray, epoch: int) -> Batch:
        return {"digest": rows, "amount": np.full(len(rows), amount_taken())}

    def name(self, shard: int, row: int) -> str:
        return f"{shard}/{row}"


def test_tasks_that_prepare_and_read_take_the_resources_of_their_nodes(cluster: dict[str, str], tmp_path: Path) -> None:
    entries = run_recorded_tasks(lambda _: {"amount": amount_taken()}, ["a"], str(tmp_path), resources={HEAD: 0.25})
    assert entries == [{"amount": 0.25}]
    stream = RankStream(
        source=Places(), plan=StreamPlan(shard_sizes=(8,), seed=0), batch_size=8, rank=0, world_size=1,
        reader_resources={HEAD: 0.25},
    )  # fmt: skip
    assert [batch["amount"].tolist() for batch in stream.batches(0, 8)] == [[0.25] * 8]
    check_placement("data.reader_resources", {HEAD: 1.0})
    check_placement("data.reader_resources", {})
    with pytest.raises(ValueError, match=r"data.reader_resources = reader=0.5, but no node .* \(largest: reader=0\)"):
        check_placement("data.reader_resources", {"reader": 0.5})


REASONS = ["slow_down", "network_connection"]


class Failing:
    """Repeats a request for every item, and two for the items of odd shards."""

    def read(self, shards: np.ndarray, rows: np.ndarray, epoch: int) -> Batch:
        for shard in shards:
            for reason in REASONS[: 1 + shard % 2]:
                RETRIES.add(f"s3://bucket-{epoch}", reason)
        return {"digest": rows}

    def name(self, shard: int, row: int) -> str:
        return f"{shard}/{row}"


@pytest.mark.parametrize("num_readers", [0, 2])
def test_what_readers_count_arrives_with_the_batches(cluster: dict[str, str], num_readers: int) -> None:
    RETRIES.take()
    plan = StreamPlan(shard_sizes=(8, 8, 16), seed=0, window_size=8)
    for rank in range(2):
        stream = RankStream(
            source=Failing(), plan=plan, batch_size=4, rank=rank, world_size=2, num_readers=num_readers,
            num_batches_per_task=2, num_batches_per_output=1,
        )  # fmt: skip
        batches = list(stream.batches(0, 64))
        assert all(set(batch) == {"digest", "place"} for batch in batches)
        assert sum(len(batch["place"]) for batch in batches) == 32
    epoch = {"slow_down": 32, "network_connection": 8}
    assert json.loads(RETRIES.take()) == {"s3://bucket-0": epoch, "s3://bucket-1": epoch}


def test_what_preparing_tasks_count_arrives_and_is_said(
    cluster: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def prepare(number: int) -> dict[str, int]:
        for _ in range(number):
            RETRIES.add("s3://bucket", "slow_down")
        return {"number": number}

    RETRIES.take()
    entries = run_recorded_tasks(prepare, [f"unit-{number}" for number in range(5)], str(tmp_path))
    assert entries == [{"number": number} for number in range(5)]
    assert json.loads(RETRIES.take()) == {"s3://bucket": {"slow_down": 10}}
    said = [line for line in capsys.readouterr().err.splitlines() if "were repeated" in line]
    assert len(said) == 1
    assert re.search(r": \d+ to s3://bucket \(last reason: slow_down\); \d+ so far$", said[0])
