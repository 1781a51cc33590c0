"""Tests population based training on a real Ray, against runs that were never interrupted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from mlflow import MlflowClient
from sweep_support import TINY

from jobs.engine.command_line import parse_preset
from jobs.studies.sweeps.launch import run_sweep
from jobs.studies.sweeps.plan import make_sweep
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

    population = [
        "--sweep.scheduler=pbt", "--sweep.num-generations=2", "--sweep.band", "0.01", "1.99",
        "--sweep.axes", "optimizer.learning-rate-base=1e-5,3e-3",
    ]  # fmt: skip
    first_slow, first_fast, moved, kept = rows = run(*population)
    rate = "optimizer.learning_rate_base"
    assert [row.point[rate] for row in (first_slow, first_fast, kept)] == [1e-5, 3e-3, 3e-3]
    assert moved.point[rate] == 2.4e-3  # 3.6e-3 lies beyond the end of the axis
    assert [row.num_steps for row in rows] == [6, 6, 4, 4]  # together two whole runs
    assert [row.stopped for row in rows] == ["generation 1 of 2 is over"] * 2 + [""] * 2
    directories = [tmp_path / "rho" / row.name for row in rows]
    starts = [json.loads((path / "configuration.json").read_text()).get("run.start_from") for path in directories]
    assert starts == [None, None, f"{first_fast.name}@6", f"{first_fast.name}@6"]

    # The run that was kept is the one that was never interrupted; the other has its history, and then its own.
    (whole,) = run("--base.run.name=whole", "--sweep.axes", "optimizer.learning-rate-base=3e-3")
    assert kept.history == whole.history
    assert moved.history[:3] == whole.history[:3]
    assert all(mine != other for mine, other in zip(moved.history[3:], whole.history[3:], strict=True))
    client = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    (moved_run,) = client.search_runs(
        [client.get_experiment_by_name("language-models").experiment_id],  # type: ignore[union-attr]
        f"attributes.run_name = '{moved.name}'",
    )
    assert moved_run.data.params["run.start_from"] == f"{first_fast.name}@6"

    # Started again, it finds every generation and trains nothing.
    assert run(*population) == rows
