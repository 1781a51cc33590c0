"""A sweep of the main job for real: trials side by side on prepared data that they share, and what is left of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from support import tiny_config

from jobs.sweeps.config import LanguageModelSweep, SweepSection
from jobs.sweeps.launch import make_sweep, run_sweep

pytestmark = pytest.mark.cluster


def test_trials_share_their_data_and_are_reported_together(
    cluster: dict[str, str], corpus: Path, tmp_path: Path
) -> None:
    sections: dict[str, Any] = {
        "run": {"num_steps": 10, "max_restarts": 0},
        "temperature": {"rho": 1.0, "target_entropy": None},
        "workers": {"num_workers": 1, "zero_stage": 0},
    }
    config = LanguageModelSweep(
        base=tiny_config(corpus, tmp_path, "rho", **sections), sweep=SweepSection(axes=("temperature.rho=0.5,2.5",))
    )
    results = run_sweep(make_sweep(config))
    assert not results.failed
    assert [row.name for row in results.rows] == ["rho0.5", "rho2.5"]
    assert results.rows[0].tau_mean != results.rows[1].tau_mean
    # Prepared once, beside the sweep.
    assert len(list((tmp_path / "prepared").iterdir())) == 2
    assert not list((tmp_path / "rho").glob("*/prepared"))
    written = json.loads((tmp_path / "rho" / "results.json").read_text())
    assert [row["tau_mean"] for row in written["rows"]] == [row.tau_mean for row in results.rows]
    assert "<img" in (tmp_path / "rho" / "report.html").read_text()

    client = MlflowClient(results.tracking_uri)
    experiment = client.get_experiment_by_name("language-models")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    (parent,) = (run for run in runs if "mlflow.parentRunId" not in run.data.tags)
    assert sorted(run.info.run_name for run in runs if run is not parent) == ["rho0.5", "rho2.5"]
    assert {file.path for file in client.list_artifacts(parent.info.run_id)} == {
        "results.md", "results.json", "report.html",
    }  # fmt: skip

    # Started again, nothing is trained.
    assert run_sweep(make_sweep(config)).rows == results.rows
