"""Test that a run on two nodes comes through what happens to it: single faults, and a seeded schedule of three.

`benchmarks.faults` prints the table of many schedules, with every fault.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from fault_site import Site, run_site
from fault_support import FAULTS, Reference, Report, Schedule, draw, run_schedule
from server_support import RAY_OF_TESTS

pytestmark = [pytest.mark.cluster, pytest.mark.long]

NUM_STEPS, NUM_STEPS_LONG = 300, 600
"""Number of steps of the runs with one fault, and with three."""

ELSEWHERE = {
    "worker killed": "test_train_lm.py",
    "driver killed": "test_train_lm.py",
    "store fails": "test_object_store.py",
    "store slow": "test_object_store.py",
    "checkpoint damaged": "test_survival.py",
}
"""Fault → test of a shorter run that it happens to."""


@pytest.fixture(scope="module")
def site(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    place = tmp_path_factory.mktemp("faults") / "site"
    with run_site(corpus, place, num_steps=NUM_STEPS, seconds_of_trouble=3.0, program=RAY_OF_TESTS) as site:
        yield site


@pytest.fixture(scope="module")
def reference(site: Site) -> Reference:
    """Train the run that nothing happens to."""
    return Reference.train(site, "undisturbed")


def assert_survives(schedule: Schedule, site: Site, reference: Reference, name: str) -> Report:
    report = run_schedule(schedule, site, reference, name)
    assert report.is_good, (schedule, report)
    return report


@pytest.mark.parametrize("fault", sorted(FAULTS.keys() - ELSEWHERE.keys()))
def test_a_run_comes_through_a_fault(site: Site, reference: Reference, fault: str) -> None:
    step = random.Random(fault).randrange(30, NUM_STEPS // 3, 10)
    report = assert_survives([(step, fault)], site, reference, fault.replace(" ", "-"))
    if fault == "node lost":
        said = "\n".join(report.lines)
        assert "the cluster has room for 1 of 2 workers: the run goes on with 1" in said
        assert "the cluster has room for 2 workers: the run grows from 1, from step " in said


def test_a_run_comes_through_a_schedule_of_three_faults(site: Site) -> None:
    site = replace(site, num_steps=NUM_STEPS_LONG, seconds_of_trouble=5.0)
    schedule = draw(1, NUM_STEPS_LONG)
    assert schedule == draw(1, NUM_STEPS_LONG) != draw(0, NUM_STEPS_LONG)
    assert_survives(schedule, site, Reference.train(site, "undisturbed-long"), "three")
