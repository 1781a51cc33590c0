"""Test a real but minimal experiment: its run is made once, lies under its parent in MLflow, and is in the table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from mlflow import MlflowClient

from jobs.studies.reproduction.config import ReproduceConfig
from jobs.studies.reproduction.launch import run_reproduction
from jobs.studies.reproduction.plan import make_reproduction

pytestmark = pytest.mark.cluster


def test_a_run_is_made_once_and_its_figures_are_in_the_table(
    cluster: dict[str, str], corpus: Path, tmp_path: Path
) -> None:
    changes = {
        "data.train": corpus / "train", "data.validation": corpus / "validation", "data.tokenizer": corpus / "tokenizer",
        "data.context_length": 64, "model.hidden_size": 64, "model.num_layers": 1, "model.num_heads": 4,
        "temperature.hidden_size": 32, "temperature.num_prototypes": 16, "validation.num_oracle_tokens": 256,
        "workers.zero_stage": 0, "run.max_restarts": 0,
    }  # fmt: skip
    config = ReproduceConfig(
        experiment="T16",
        arms=("ρ = 0",),
        seeds=1,
        steps=4,
        storage=str(tmp_path),
        change=tuple(f"{name}={value}" for name, value in changes.items()),
    )
    work = make_reproduction(config)
    results = run_reproduction(work)
    assert not results.failed
    (run,) = work.runs.values()
    ended = Path(run.config.run.directory, "outcome.json")
    tau = json.loads(ended.read_text())["validation"]["tau_mean"]
    directory = Path(config.run.directory)
    written = json.loads((directory / "results.json").read_text())
    assert written["studies"][0]["arms"][0]["figures"]["tau_mean"]["values"] == [tau]
    assert written["verdict"] == "cannot be seen at this scale"
    assert (directory / "results.md").read_text().strip() == results.table

    client = MlflowClient(results.tracking_uri)
    experiment = client.get_experiment_by_name("reproduce")
    assert experiment is not None
    found = {one.info.run_name: one for one in client.search_runs([experiment.experiment_id])}
    parent = found.pop(config.run.name)
    assert parent.data.tags["paper.table"] == "TempNet Table 16"
    assert [one.data.tags["mlflow.parentRunId"] for one in found.values()] == [parent.info.run_id]
    assert list(found) == [run.name]

    # If the experiment is started again, nothing is trained.
    before = ended.stat().st_mtime_ns
    assert run_reproduction(make_reproduction(config)).table == results.table
    assert ended.stat().st_mtime_ns == before
