"""Test how many workers an elastic run has: which numbers are possible, what fits, and when the run shrinks and grows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.train import ScalingConfig
from ray.train.v2._internal.execution.scaling_policy import NoopDecision, ResizeDecision

from jobs.engine import elasticity
from jobs.engine.config import OptimizerSection, RunSection, TrainingConfig, WorkersSection
from jobs.engine.elasticity import ElasticPolicy

Nodes = list[dict[str, float]]


def configure(num_workers: int | str, batch_size: int, micro_batch_size: int = 0) -> TrainingConfig:
    return TrainingConfig(
        run=RunSection(name="run"),
        optimizer=OptimizerSection(batch_size=batch_size, micro_batch_size=micro_batch_size),
        workers=WorkersSection(num_workers=num_workers),
    )


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 12), st.integers(0, 4))
def test_possible_numbers_divide_the_batch_and_the_micro_batch(
    first: int, second: int, factor: int, micro: int
) -> None:
    least, most = sorted((first, second))
    size = least * most * factor * max(1, micro)
    config = configure(f"{least}:{most}", size, micro)
    expected = [n for n in range(least, most + 1) if size % n == 0 and (not micro or size // n % micro == 0)]
    assert config.possible_num_workers == expected
    assert {least, most} <= set(expected)
    assert configure(most, size).possible_num_workers == [most]  # A fixed number is what it is.
    for number in expected:
        smaller = config.with_num_workers(number)
        assert smaller.micro_batch_size * smaller.num_accumulation_steps * number == size
    assert config.micro_batch_size == config.with_num_workers(most).micro_batch_size


@pytest.mark.parametrize("value", ["0:2", "3:2", "2:", "two", "1:2:3", 0])
def test_what_is_no_range_is_refused(value: int | str) -> None:
    with pytest.raises(ValueError, match=r"workers\.num_workers = "):
        WorkersSection(num_workers=value)


class Cluster:
    """Nodes, a clock, the last checkpoint and the mailbox that a policy sees, which a test changes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.total: Nodes = []
        self.free: Nodes = []
        self.now, self.step, self.num_saves = 0.0, 5, 0
        self.said: list[str] = []
        monkeypatch.setattr(elasticity, "free_resources", lambda: dict(enumerate(self.free)))
        monkeypatch.setattr(elasticity, "answering_nodes", self.list_nodes)
        monkeypatch.setattr(elasticity.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(elasticity, "registered_step", lambda directory: self.step)
        monkeypatch.setattr(ElasticPolicy, "_maybe_send_resource_request", lambda policy: None)

    def list_nodes(self) -> list[dict[str, Any]]:
        return [{"NodeID": number, "Resources": resources} for number, resources in enumerate(self.total)]

    def ask_to_save(self) -> None:
        self.num_saves += 1

    @property
    def mailbox(self) -> Any:
        return SimpleNamespace(ask_to_save=self.ask_to_save, say=self.said.append)

    def make_policy(self, possible: list[int], cpus: float = 1.0, data_cpus: float = 0.0) -> ElasticPolicy:
        scaling = ScalingConfig(num_workers=possible[-1], resources_per_worker={"CPU": cpus})
        return ElasticPolicy(
            scaling, possible=possible, data_cpus=data_cpus, directory="runs/run", mailbox=self.mailbox
        )


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return Cluster(monkeypatch)


def start(policy: ElasticPolicy) -> int | None:
    """Return the number of workers that the policy starts; None if it waits."""
    decision = policy.make_decision_for_non_running_worker_group()
    return decision.num_workers if isinstance(decision, ResizeDecision) else None


def look(policy: ElasticPolicy, running: int) -> int | None:
    """Return the number of workers that the policy changes a running group to; None if it leaves it."""
    decision = policy.make_decision_for_running_worker_group(SimpleNamespace(num_workers=running), None)
    assert isinstance(decision, ResizeDecision | NoopDecision)
    return decision.num_workers if isinstance(decision, ResizeDecision) else None


def test_a_run_starts_with_what_fits_and_tries_fewer_where_others_are(cluster: Cluster) -> None:
    cluster.total = [{"CPU": 4.0}, {"CPU": 2.0}]
    policy = cluster.make_policy([1, 2, 4, 8])
    # It does not fit what is there in the order 4, 2, 1; when all have failed, it begins again.
    assert [start(policy) for _ in range(5)] == [4, 2, 1, 4, 2]
    assert cluster.said[0] == "the cluster has room for 6 of 8 workers: the run goes on with 4"


def test_the_cpus_of_readers_are_left_free_and_fragments_are_not_counted(cluster: Cluster) -> None:
    cluster.total = [{"CPU": 4.0}]
    assert start(cluster.make_policy([1, 2, 3, 4], data_cpus=0.0)) == 4
    assert start(cluster.make_policy([1, 2, 3, 4], data_cpus=4.0)) == 2
    cluster.total = [{"CPU": 1.5}, {"CPU": 1.5}]
    assert start(cluster.make_policy([1, 2, 3], data_cpus=0.0)) == 2
    cluster.total = [{"CPU": 0.3}] * 2  # .1 is not exact in binary
    assert start(cluster.make_policy([1, 6], cpus=0.1)) == 6


def test_after_a_failure_the_table_of_nodes_settles_first(cluster: Cluster) -> None:
    cluster.total = [{"CPU": 1.0}, {"CPU": 1.0}]
    policy = cluster.make_policy([1, 2])
    assert start(policy) == 2
    assert look(policy, 2) is None
    assert start(policy) is None
    cluster.total.pop()
    cluster.now = 2.9
    assert start(policy) is None
    cluster.now = 3.1
    assert start(policy) == 1
    assert cluster.said == ["the cluster has room for 1 of 2 workers: the run goes on with 1"]


def test_a_run_grows_after_it_has_saved(cluster: Cluster) -> None:
    cluster.total = cluster.free = [{"CPU": 1.0}]
    policy = cluster.make_policy([1, 2, 4])
    assert start(policy) == 1
    cluster.free = [{"CPU": 0.0}]
    assert [look(policy, 1) for _ in range(3)] == [None] * 3
    cluster.total, cluster.free = [{"CPU": 1.0}, {"CPU": 2.0}], [{"CPU": 0.0}, {"CPU": 2.0}]
    assert [look(policy, 1) for _ in range(3)] == [None] * 3
    assert cluster.num_saves == 1
    cluster.step = 7
    assert look(policy, 1) == 2
    assert cluster.said[-1] == "the cluster has room for 2 workers: the run grows from 1, from step 7"
    # If the group cannot be started, because others were faster, fewer workers are tried.
    assert start(policy) == 1


def test_resources_that_go_again_end_the_wish_to_grow(cluster: Cluster) -> None:
    cluster.total = [{"CPU": 2.0}]
    policy = cluster.make_policy([1, 2])
    cluster.free = [{"CPU": 1.0}]
    assert look(policy, 1) is None
    cluster.free = [{"CPU": 0.0}]
    cluster.step = 9
    assert look(policy, 1) is None
    cluster.free = [{"CPU": 1.0}]
    assert look(policy, 1) is None
    assert cluster.num_saves == 2


def test_what_readers_leave_free_for_a_moment_is_no_room(cluster: Cluster) -> None:
    cluster.total, cluster.free = [{"CPU": 2.0}], [{"CPU": 1.0}]
    policy = cluster.make_policy([1, 2, 4], cpus=0.5, data_cpus=2.0)
    assert start(policy) == 2
    cluster.step += 1
    assert [look(policy, 2) for _ in range(2)] == [None, None]
    assert cluster.num_saves == 0
