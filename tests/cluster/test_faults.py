"""Test that a run on two nodes comes through what a seeded schedule does to it (`benchmarks.faults` prints the table)."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from fault_site import Ending, Site, run_site
from fault_support import FAULTS, MESSAGES, Reference, draw, find_unexplained, run_schedule
from node_support import RAY_OF_TESTS

pytestmark = pytest.mark.cluster

NUM_STEPS, NUM_STEPS_SHORT = 900, 300
SEEDS = (0, 1, 2)
"""Seeds of schedules of three faults each, in long runs."""
SINGLE_SEEDS = (6, 17, 28)
"""Seeds of schedules of one fault each, in short runs: a worker is killed, the head is lost, the store can only be read."""
MORE_SINGLE_SEEDS = (0, 1, 2, 4, 7, 8, 10, 16, 18, 20, 22, 24, 27, 44)
"""With these every fault happens alone; three happen twice, at other steps."""


def test_twenty_schedules_let_every_fault_happen_alone() -> None:
    singles = [draw(seed, NUM_STEPS_SHORT, num_faults=1) for seed in (*SINGLE_SEEDS, *MORE_SINGLE_SEEDS)]
    assert {fault for schedule in singles for _, fault in schedule} == set(FAULTS)
    assert len(singles) + len(SEEDS) == 20
    assert draw(3, NUM_STEPS) == draw(3, NUM_STEPS) != draw(4, NUM_STEPS)


def test_words_that_a_person_understands_are_told_from_those_of_ray_and_the_store() -> None:
    lost = "error: Ray's head at 127.0.0.1:1 does not answer: the cluster is lost, or its control service is. To continue, …"
    understood = [(1, lost, "head lost"), (-signal.SIGKILL, "step 3", "driver killed"), (1, "error: no room", "")]
    bare = [
        (1, "ray.exceptions.ActorUnavailableError: The actor is temporarily unavailable", "control service killed"),
        (
            1,
            "error: OSError: When completing multiple part upload for key 'a': AWS Error ACCESS_DENIED",
            "store read-only",
        ),
        (1, "KeyError: 'a'", "worker killed"),
        (1, "error: it failed", "head lost"),
        (1, "", ""),
    ]
    assert not find_unexplained([Ending(status=status, line=line, fault=fault) for status, line, fault in understood])
    found = find_unexplained([Ending(status=status, line=line, fault=fault) for status, line, fault in bare])
    assert len(found) == len(bare)
    assert MESSAGES.keys() <= FAULTS.keys()


@pytest.fixture(scope="class")
def long_site(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Run what all long runs share, and end it before the short runs begin."""
    place = tmp_path_factory.mktemp("three-faults")
    with run_site(corpus, place / "site", num_steps=NUM_STEPS, seconds_of_trouble=5.0, program=RAY_OF_TESTS) as site:
        yield site


@pytest.fixture(scope="class")
def long_reference(long_site: Site) -> Reference:
    """Train the long run that nothing happens to."""
    return Reference.train(long_site)


class TestSchedulesOfThreeFaults:
    """Long runs."""

    @pytest.mark.long
    @pytest.mark.parametrize("seed", SEEDS)
    def test_a_run_comes_through_a_schedule_of_three_faults(
        self, long_site: Site, long_reference: Reference, seed: int
    ) -> None:
        schedule = draw(seed, NUM_STEPS)
        report = run_schedule(schedule, long_site, long_reference, f"seed-{seed}")
        assert report.is_good, (schedule, report)


@pytest.fixture(scope="module")
def short_site(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Run what all short runs share."""
    place = tmp_path_factory.mktemp("single-faults")
    with run_site(
        corpus, place / "site", num_steps=NUM_STEPS_SHORT, seconds_of_trouble=3.0, program=RAY_OF_TESTS
    ) as site:
        yield site


@pytest.fixture(scope="module")
def short_reference(short_site: Site) -> Reference:
    """Train the short run that nothing happens to."""
    return Reference.train(short_site)


@pytest.mark.parametrize(
    "seed", [*SINGLE_SEEDS, *(pytest.param(seed, marks=pytest.mark.long) for seed in MORE_SINGLE_SEEDS)]
)
def test_a_short_run_comes_through_a_single_fault(short_site: Site, short_reference: Reference, seed: int) -> None:
    schedule = draw(seed, NUM_STEPS_SHORT, num_faults=1)
    report = run_schedule(schedule, short_site, short_reference, f"seed-{seed}")
    assert report.is_good, (schedule, report)
