"""Test a real but minimal experiment: its runs are made once, lie under their parent in MLflow, and are in the table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support import sweep_runs

from jobs.studies.reproduction.config import ReproduceConfig
from jobs.studies.reproduction.launch import run_reproduction
from jobs.studies.reproduction.plan import make_reproduction

pytestmark = pytest.mark.cluster


def test_runs_are_made_once_and_their_figures_are_in_the_table(
    cluster: dict[str, str], corpus: Path, tmp_path: Path
) -> None:
    changes = (
        f"data.train={corpus}/train", f"data.validation={corpus}/validation", f"data.tokenizer={corpus}/tokenizer",
        "data.context_length=64", "model.hidden_size=64", "model.num_layers=1", "model.num_heads=4",
        "temperature.hidden_size=32", "temperature.num_prototypes=16", "validation.num_oracle_tokens=256",
        "workers.zero_stage=0", "run.max_restarts=0",
    )  # fmt: skip
    arms = ("ρ = 1.5", "ρ = 2")
    config = ReproduceConfig(experiment="T15", arms=arms, seeds=1, steps=4, storage=str(tmp_path), change=changes)
    work = make_reproduction(config)
    results = run_reproduction(work)
    assert not results.failed
    _, *networks = work.runs.values()  # the networks train side by side on the base
    ended = [Path(run.config.run.directory, "outcome.json") for run in networks]
    tau = [json.loads(file.read_text())["validation"]["tau_mean"] for file in ended]
    directory = Path(config.run.directory)
    written = json.loads((directory / "results.json").read_text())
    rows = {arm["name"]: arm["figures"] for arm in written["studies"][0]["arms"]}
    assert [rows[arm]["tau_mean"]["values"] for arm in config.arms] == [[value] for value in tau]
    assert written["verdict"] == "cannot be seen at this scale"
    assert (directory / "results.md").read_text().strip() == results.table

    parent, found = sweep_runs(results.tracking_uri, "reproduce", config.run.name)
    assert parent.data.tags["paper.table"] == "TempNet Table 15"
    assert found.keys() == work.runs.keys()

    # If the experiment is started again, nothing is trained.
    before = [file.stat().st_mtime_ns for file in ended]
    assert run_reproduction(make_reproduction(config)).table == results.table
    assert [file.stat().st_mtime_ns for file in ended] == before
