"""A sweep of the main job for real: trials side by side on prepared data that they share, and what is left of them."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path

import pytest
from mlflow import MlflowClient
from support import readme_lines

from jobs.command_line import parse_preset
from jobs.presets.sweeps import PRESETS
from jobs.sweeps.launch import make_sweep, run_sweep

pytestmark = pytest.mark.cluster

TINY = [
    "--base.run.name=rho", "--base.run.num-steps=10", "--base.run.max-restarts=0", "--base.data.train=DIR/train",
    "--base.data.validation=DIR/validation", "--base.data.tokenizer=DIR/tokenizer", "--base.data.context-length=64",
    "--base.model.hidden-size=64", "--base.model.num-layers=2", "--base.model.num-heads=4", "--base.workers.num-workers=1",
    "--base.workers.zero-stage=0", "--base.workers.num-threads=1", "--base.validation.num-oracle-tokens=512",
    "--base.temperature.hidden-size=32", "--base.temperature.num-prototypes=16", "--base.optimizer.batch-size=8",
    "--base.temperature.rho=1",
]  # fmt: skip


def test_trials_share_their_data_and_are_reported_together(
    cluster: dict[str, str], corpus: Path, tmp_path: Path
) -> None:
    paths = {"temperature.rho=2.3,2.7,3.1": "temperature.rho=0.5,2.5", ".venv/bin/python": sys.executable}
    (line,) = readme_lines(rf"{re.escape(sys.executable)} -m jobs\.sweep gpt2", paths)
    words = [
        *shlex.split(line)[3:],
        *(word.replace("DIR", str(corpus)) for word in TINY),
        f"--base.run.storage={tmp_path}",
    ]
    config, _ = parse_preset(PRESETS, words, job="sweep", purpose="")
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
    for run in runs:
        assert (run.data.tags["preset"], run.data.tags["paper.table"]) == ("gpt2-rho-lr-small", "TempNet, §6.1")
    assert "| trial" in parent.data.tags["mlflow.note.content"]
    assert {file.path for file in client.list_artifacts(parent.info.run_id)} == {
        "results.md", "results.json", "report.html",
    }  # fmt: skip

    # Started again, nothing is trained.
    assert run_sweep(make_sweep(config)).rows == results.rows
