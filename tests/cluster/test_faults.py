"""Test that a run on two nodes comes through what a seeded schedule does to it (`benchmarks.faults` has more seeds)."""

from __future__ import annotations

from pathlib import Path

import pytest
from fault_support import FAULTS, draw, run_schedule

pytestmark = [pytest.mark.cluster, pytest.mark.long]


def test_twenty_schedules_draw_every_fault() -> None:
    assert {fault for seed in range(20) for _, fault in draw(seed)} == set(FAULTS)
    assert draw(3) == draw(3) != draw(4)


def test_a_run_comes_through_a_schedule(corpus: Path, tmp_path: Path) -> None:
    report = run_schedule(draw(0), corpus, tmp_path / "world")
    assert report.is_good, report
