"""Test on a real Ray what a frozen base makes possible: training from stored features, and a grid in one run.

That features stand for their base, and runs side by side for single ones, is tested without Ray in tests/jobs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from readme_support import lines_like, run_line
from support import FROZEN_OPTIONS

from tempnet.loading import load_causal_lm

pytestmark = pytest.mark.cluster

NUM_STEPS = 12
OPTIONS = [*FROZEN_OPTIONS, f"--run.num-steps={NUM_STEPS}", "--optimizer.micro-batch-size=2", "--workers.zero-stage=0"]
AXES = ["--sweep.axes", "temperature.rho=1,2", "optimizer.learning_rate_tempnet=1e-2,1e-3"]


def of_base(options: list[str]) -> list[str]:
    """Return the options of a run as those of a sweep's base."""
    return [option.replace("--", "--base.", 1) for option in options]


def test_a_grid_trains_from_stored_features(home: Path, reference: dict[str, Any]) -> None:
    (prepare,), (sweep,) = lines_like("jobs.prepare_features *"), lines_like("jobs.sweep frozen-rho-lr-small *")
    run_line(prepare, *OPTIONS, "--temperature.rho=1.5")
    run_line(sweep, *of_base(OPTIONS), *AXES, "--base.run.num-steps=4")
    rows = json.loads((home / "runs" / "frozen-rho-lr-small" / "results.json").read_text())["rows"]
    assert [row["num_steps"] for row in rows] == [4] * 4
    assert len({row["tau_mean"] for row in rows}) == 4
    load_causal_lm(home / "runs" / "frozen-rho-lr-small" / rows[0]["name"] / "export")
