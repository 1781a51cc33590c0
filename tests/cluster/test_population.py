"""Test population based training by Ray Tune on a real Ray, against a run that was never interrupted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sweep_support import TINY

from jobs.engine.command_line import parse_preset
from jobs.studies.sweeps.launch import make_sweep, run_sweep
from jobs.studies.sweeps.presets import PRESETS
from jobs.studies.sweeps.report import Row

pytestmark = pytest.mark.cluster


@pytest.mark.long
def test_a_population_goes_on_from_its_best_runs(cluster: dict[str, str], corpus: Path, tmp_path: Path) -> None:
    words = [word.replace("DIR", str(corpus)) for word in TINY[: TINY.index("--sweep.axes")]]
    words += [f"--base.run.storage={tmp_path}"]

    def run(*more: str) -> list[Row]:
        config, _ = parse_preset(PRESETS, ["gpt2-rho-lr-small", *words, *more], job="sweep", purpose="")
        results = run_sweep(make_sweep(config))
        assert not results.failed
        return list(results.rows)

    rate, ends = "optimizer.learning_rate_base", "optimizer.learning-rate-base=1e-5,3e-3"
    population = [
        "--sweep.scheduler=pbt", "--sweep.num-generations=2", "--sweep.band", "0.01", "1.99", "--base.run.num-steps=24",
        "--base.validation.every=4", "--sweep.axes", ends,
    ]  # fmt: skip
    rows = {row.name: row for row in run(*population)}
    slow, fast = rows["learning_rate_base1e-05"], rows["learning_rate_base0.003"]
    (moved,) = (row for row in rows.values() if "-from-" in row.name)
    assert moved.point[rate] in (pytest.approx(2.4e-3), 3e-3)  # 3.6e-3 lies beyond the end of the axis
    assert slow.stopped
    assert (fast.num_steps, fast.stopped, moved.stopped) == (24, "", "")
    held = json.loads((tmp_path / "rho" / moved.name / "configuration.json").read_text())
    start = int(held["run.start_from"].removeprefix(f"{fast.name}@"))
    assert 12 <= start < 24
    assert moved.num_steps == 24 - start
    # Up to there it has the history of the run that it goes on from, and then its own.
    shared = [validation for validation in fast.history if validation[0] <= start]
    assert moved.history[: len(shared)] == shared
    assert moved.point[rate] == 3e-3 or moved.history[-1] != fast.history[-1]

    # The run that was kept, and paused meanwhile, is the one that was never interrupted.
    (whole,) = run(
        "--base.run.name=whole", "--base.run.num-steps=24", "--base.validation.every=4", "--sweep.axes", f"{rate}=3e-3"
    )
    assert [step for step, _, _ in fast.history] == [step for step, _, _ in whole.history]
    assert fast.history[-1][1:] == pytest.approx(whole.history[-1][1:], abs=1e-6)
