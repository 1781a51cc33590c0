"""Test that a run on two nodes comes through what a seeded schedule does to it (`benchmarks.faults` prints the table)."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from fault_site import Ending, Site, run_site
from fault_support import FAULTS, MESSAGES, Reference, draw, find_unexplained, run_schedule

pytestmark = pytest.mark.cluster

NUM_SCHEDULES = 20
NUM_STEPS, NUM_STEPS_SHORT = 900, 300
SHORT_SEEDS = (6, 17, 28)
"""Seeds of schedules of one fault each: a worker is killed, the head is lost, the store can only be read."""


def test_twenty_schedules_draw_every_fault() -> None:
    assert {fault for seed in range(NUM_SCHEDULES) for _, fault in draw(seed, NUM_STEPS)} == set(FAULTS)
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


@pytest.fixture(scope="module")
def site(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Run what all schedules share."""
    place = tmp_path_factory.mktemp("faults")
    with run_site(corpus, place / "site", num_steps=NUM_STEPS, seconds_of_trouble=5.0) as site:
        yield site


@pytest.fixture(scope="module")
def reference(site: Site) -> Reference:
    """Train the run that nothing happens to."""
    return Reference.train(site)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(NUM_SCHEDULES))
def test_a_run_comes_through_a_schedule_of_faults(site: Site, reference: Reference, seed: int) -> None:
    schedule = draw(seed, NUM_STEPS)
    report = run_schedule(schedule, site, reference, f"seed-{seed}")
    assert report.is_good, (schedule, report)


def test_a_short_run_comes_through_single_faults(corpus: Path, tmp_path: Path) -> None:
    with run_site(corpus, tmp_path / "site", num_steps=NUM_STEPS_SHORT, seconds_of_trouble=3.0) as site:
        reference = Reference.train(site)
        for seed in SHORT_SEEDS:
            schedule = draw(seed, NUM_STEPS_SHORT, num_faults=1)
            report = run_schedule(schedule, site, reference, f"seed-{seed}")
            assert report.is_good, (schedule, report)
