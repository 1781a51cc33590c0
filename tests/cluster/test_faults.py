"""Test that a run on two nodes comes through what a seeded schedule does to it (`benchmarks.faults` has more seeds)."""

from __future__ import annotations

from pathlib import Path

import pytest
from fault_site import run_site
from fault_support import FAULTS, Reference, draw, run_schedule

pytestmark = [pytest.mark.cluster, pytest.mark.long]


def test_twenty_schedules_draw_every_fault() -> None:
    assert {fault for seed in range(20) for _, fault in draw(seed)} == set(FAULTS)
    assert draw(3) == draw(3) != draw(4)


def test_a_run_comes_through_schedules_of_faults(corpus: Path, tmp_path: Path) -> None:
    with run_site(corpus, tmp_path / "site") as site:
        reference = Reference.train(site)
        for seed in range(3):
            report = run_schedule(draw(seed), site, reference, f"seed-{seed}")
            assert report.is_good, (draw(seed), report)
