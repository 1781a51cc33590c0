"""Tests that the end of a run is recorded in MLflow, even if MLflow did not answer when the run ended."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from jobs.engine.identity import with_fields
from jobs.engine.metrics import metric_history
from jobs.engine.recording import keep_end, record_end
from jobs.engine.tracking import open_run
from jobs.scoring.mlflow_models.run import record_models
from jobs.studies.trials.run import make_plan_in_outage
from jobs.studies.trials.trial import Trial
from jobs.tasks.presets.language_models import PRESETS


def test_what_an_outage_kept_back_is_sent_by_the_same_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = with_fields(PRESETS["gpt2-scratch-small"](), {"run.name": "a", "run.storage": str(tmp_path)})
    report = Path(config.run.directory) / "report"
    report.mkdir(parents=True)
    Path(config.run.export_directory).mkdir()
    (report / "summary.txt").write_text("fine")
    tracked = open_run(
        uri=f"sqlite:///{tmp_path}/mlflow.db", experiment="tests", name="a", directory=config.run.directory, parameters={},
        tags={}, data_sets={},
    )  # fmt: skip
    client = MlflowClient(tracked.uri)
    now = int(time.time() * 1000)
    unsent = [["train/loss", 1.0 / step, now, step] for step in range(1, 2001)]
    outcome: dict[str, Any] = {
        "tracking_uri": tracked.uri, "mlflow_run_id": tracked.run_id, "rivals": {"x": 0.5}, "num_steps": 2000,
    }  # fmt: skip
    keep_end(config, unsent, note="**fine**")
    with monkeypatch.context() as away:

        def nobody(*arguments: Any, **options: Any) -> None:
            raise ConnectionError("nobody answers")

        away.setattr(MlflowClient, "log_batch", nobody)
        record_end(config, outcome, record_models)
    assert client.get_run(tracked.run_id).info.status == "RUNNING"
    for _ in range(2):  # The second call finds nothing left to do.
        record_end(config, outcome, record_models)
        run = client.get_run(tracked.run_id)
        assert run.info.status == "FINISHED"
        assert run.data.metrics["verdict/x"] == 0.5
        assert run.data.tags["mlflow.note.content"] == "**fine**"
        assert [file.path for file in client.list_artifacts(tracked.run_id)] == ["summary.txt"]
        assert metric_history(tracked, "train/loss") == {step: 1.0 / step for step in range(1, 2001)}
    client.set_terminated(tracked.run_id, status="KILLED")
    record_end(config, outcome, record_models)
    assert client.get_run(tracked.run_id).info.status == "KILLED"


def test_a_trial_waits_for_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = PRESETS["gpt2-scratch-small"]()
    answers: list[Any] = [
        ConnectionError("MLflow does not answer"),
        ConnectionError("MLflow does not answer"),
        "a plan",
    ]

    def make_plan(config: Any) -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    trial = Trial(config=config, make_plan=make_plan)
    assert make_plan_in_outage(trial, seconds_between=0.0) == "a plan"
    assert not answers
    monkeypatch.setattr("jobs.studies.trials.run._SECONDS_OF_OUTAGE", -1.0)
    answers.append(ConnectionError("MLflow does not answer"))
    with pytest.raises(ConnectionError, match="does not answer"):
        make_plan_in_outage(trial, seconds_between=0.0)
