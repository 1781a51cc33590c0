"""Tests that a directory has one MLflow run, and that an outage of MLflow loses nothing and stops nothing."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from jobs.engine.config import TrackingSection
from jobs.engine.identity import configuration_hash, flatten
from jobs.engine.metrics import MetricLogger, metric_history
from jobs.engine.system_metrics import SystemMetrics
from jobs.engine.tags import ray_job_id, run_tags
from jobs.engine.tracking import (
    TrackedRun,
    default_uri,
    finish_run,
    mark_if_ended,
    open_run,
    resolve_uri,
    survive_outage,
)
from jobs.studies.sweeps import presets as sweeps
from jobs.tasks.presets import classifiers, clip, language_models, sentences


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow') / 'mlflow.db'}"


def open_for(uri: str, directory: str, **tags: str) -> TrackedRun:
    return open_run(
        uri=uri,
        experiment="tests",
        name="a run",
        directory=directory,
        parameters={"rho": 3.0},
        tags={"configuration_hash": "abc", **tags},
        data_sets={"training": ("prose", "0123", "/data/prose")},
    )


def test_a_directory_has_one_run_however_often_it_is_opened(uri: str, tmp_path: Path) -> None:
    first = open_for(uri, "/runs/a")
    (tmp_path / "file.txt").write_text("x")
    finish_run(first, status="FAILED", artifacts=tmp_path, metrics={"verdict/x": 1.0}, note="**y**")
    assert open_for(uri, "/runs/a") == first
    assert open_for(uri, "/runs/b") != first
    run = MlflowClient(uri).get_run(first.run_id)
    assert run.info.status == "RUNNING"
    assert run.data.params == {"rho": "3.0"}
    assert run.data.tags["configuration_hash"] == "abc"
    assert run.data.tags["mlflow.note.content"] == "**y**"
    assert run.data.tags["mlflow.user"]
    assert len(run.data.tags["git.revision"]) == 40
    assert run.inputs.dataset_inputs[0].dataset.digest == "0123"
    assert [artifact.path for artifact in MlflowClient(uri).list_artifacts(first.run_id)] == ["file.txt"]


def test_a_continued_run_names_every_ray_job_that_worked_on_it(uri: str) -> None:
    client = MlflowClient(uri)
    for job, expected in (("a", "a"), ("b", "a, b"), ("", "a, b"), ("b", "a, b")):
        run = open_for(uri, "/runs/jobs", **({"ray_job_id": job} if job else {}))
        assert client.get_run(run.run_id).data.tags["ray_job_id"] == expected
    later = open_for(uri, "/runs/later")
    assert "ray_job_id" not in client.get_run(later.run_id).data.tags
    open_for(uri, "/runs/later", ray_job_id="c")
    assert client.get_run(later.run_id).data.tags["ray_job_id"] == "c"


def test_a_submitted_job_goes_by_the_name_that_ray_job_submit_gave_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ray_job_id() == ""  # No Ray job runs here.
    told = {"runtime_env": {}, "metadata": {"job_submission_id": "raysubmit_x", "job_name": "raysubmit_x"}}
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps(told))
    assert ray_job_id() == "raysubmit_x"


@pytest.mark.parametrize(("error", "status"), [(KeyboardInterrupt, "KILLED"), (OSError, "FAILED")])
def test_what_an_error_or_ctrl_c_ends_is_not_left_running(
    uri: str, error: type[BaseException], status: str, tmp_path: Path
) -> None:
    parent = open_for(uri, str(tmp_path / "sweep"))
    under = {"mlflow.parentRunId": parent.run_id}
    going, done = (open_for(uri, str(tmp_path / name), **under) for name in ("going", "done"))
    finish_run(done, status="FINISHED", artifacts=None, metrics={})
    other = open_for(uri, str(tmp_path / "another's"))
    with pytest.raises(error), mark_if_ended(None), mark_if_ended(parent):
        raise error
    client = MlflowClient(uri)
    found = [client.get_run(run.run_id).info.status for run in (parent, going, done, other)]
    assert found == [status, status, "FINISHED", "RUNNING"]


def test_a_trial_that_was_ended_with_its_sweep_does_not_fail_afterwards(uri: str, tmp_path: Path) -> None:
    """Ray takes away what a trial runs on, and the trial may see that before its own process is ended."""
    sweep = open_for(uri, str(tmp_path))
    directory, under = str(tmp_path / "trial"), {"mlflow.parentRunId": sweep.run_id}

    def status_of_trial(*, is_ended: bool) -> str:
        trial = open_for(uri, directory, **under)
        if is_ended:
            with suppress(KeyboardInterrupt), mark_if_ended(sweep):
                raise KeyboardInterrupt
        with suppress(RuntimeError), mark_if_ended(trial):
            raise RuntimeError("an actor was lost")
        status: str = MlflowClient(uri).get_run(trial.run_id).info.status
        return status

    assert status_of_trial(is_ended=True) == "KILLED"
    assert status_of_trial(is_ended=False) == "FAILED", "the trial was continued, and this failure is its own"


def test_metrics_arrive_and_the_last_value_of_a_step_counts(uri: str) -> None:
    run = open_for(uri, "/runs/metrics")
    warnings: list[str] = []
    logger = MetricLogger(run, warn=warnings.append, seconds_between_sends=0.05)
    for step in range(1, 2501):
        logger.log({"loss": 1.0 / step, "undefined": float("nan")}, step)
    assert logger.close() == 0
    again = MetricLogger(run, warn=warnings.append)
    again.log({"loss": 7.0}, 2500)
    assert again.close() == 0
    history = metric_history(run, "loss")
    assert len(history) == 2500
    assert history[10] == pytest.approx(0.1)
    assert history[2500] == 7.0
    assert metric_history(run, "undefined") == {}
    assert not warnings


def test_an_outage_keeps_the_values_which_can_be_sent_later(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    warnings: list[str] = []
    away = MetricLogger(
        TrackedRun(uri="http://127.0.0.1:9", run_id="0" * 32), warn=warnings.append, seconds_between_sends=0.05
    )
    away.log({"loss": 2.5}, 3)
    assert away.close(seconds=1.0) == 1
    assert any("unreachable" in warning for warning in warnings)
    assert any("1 metric values could not be sent" in warning for warning in warnings)
    run = open_for(uri, "/runs/outage")
    for _ in range(2):  # Sending the values twice does no harm.
        back = MetricLogger(run, warn=warnings.append)
        back.resend(away.unsent())
        assert back.close() == 0
    assert metric_history(run, "loss") == {3: 2.5}
    with survive_outage("nothing"):
        raise ConnectionError


def test_a_server_that_does_not_answer_is_named_before_anything_starts(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as taken:  # Nobody listens on this port.
        taken.bind(("127.0.0.1", 0))
        uri = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConnectionError, match=rf"tracking\.uri = '{uri}' does not answer: .*--tracking\.optional"):
            resolve_uri(TrackingSection(uri=uri), "/runs")
        assert resolve_uri(TrackingSection(uri=uri, optional=True), "/runs") == ""
        assert "nothing is logged" in caplog.text
        assert resolve_uri(TrackingSection(uri=uri, enabled=False), "/runs") == ""


@pytest.mark.parametrize("status", [200, 403])
def test_a_server_that_answers_is_taken(status: int) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        uri = f"http://127.0.0.1:{server.server_port}"
        assert resolve_uri(TrackingSection(uri=uri), "/runs") == uri
        thread.join()


def test_the_default_store_lies_beside_the_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert default_uri("/a/runs") == "sqlite:////a/runs/mlflow.db"
    with pytest.raises(ValueError, match=r"no local directory .* --tracking\.no-enabled"):
        default_uri("s3://bucket")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://server:5000")
    assert default_uri("s3://bucket") == "http://server:5000"


ALL_PRESETS = [*language_models.PRESETS.items(), *clip.PRESETS.items(), *classifiers.PRESETS.items(),
               *sentences.PRESETS.items(), *sweeps.PRESETS.items()]  # fmt: skip


@pytest.mark.parametrize(("name", "preset"), ALL_PRESETS)
def test_every_preset_is_found_by_its_name_and_its_place_in_a_paper(name: str, preset: Callable[[], Any]) -> None:
    config = preset()
    tracking = getattr(config, "base", config).tracking
    tags = run_tags(config, tracking)
    assert tags["preset"] == name
    assert tags["configuration_hash"] == configuration_hash(config)
    ours = ("frozen", "frozen-small", "frozen-rho-lr-small", "declutr-small-tempnet", "declutr-small-tempnet-small")
    assert ("paper.table" in tags) == (name not in ours)
    if "Table" in tags.get("paper.table", "") and "-small" not in name and "rho-lr" not in name:
        assert tags["paper.table"].partition(", ")[2] in (preset.__doc__ or "")


def test_trials_are_found_by_the_preset_of_their_sweep_and_tags_change_no_hash() -> None:
    config = sweeps.PRESETS["gpt2-rho-lr-small"]()
    trial = config.trial(next(config.start())[0])
    tags = run_tags(trial, trial.tracking)
    assert (tags["preset"], tags["paper.table"]) == ("gpt2-rho-lr-small", "TempNet, §6.1")
    untagged = replace(trial, tracking=replace(trial.tracking, preset="", paper="", system_metrics=False))
    assert configuration_hash(untagged) == configuration_hash(trial)
    assert flatten(untagged) != flatten(trial)
    assert run_tags(untagged, untagged.tracking).keys() == {"configuration_hash"}


def test_the_machine_is_logged_under_mlflows_names(uri: str) -> None:
    run = open_for(uri, "/runs/system")
    logger = MetricLogger(run, warn=print)
    system = SystemMetrics(logger, lambda: 7, seconds_between_samples=0.05)
    until = time.monotonic() + 0.3
    while time.monotonic() < until:
        sum(range(10_000))  # This makes a load that can be measured.
    system.close()
    short = SystemMetrics(logger, lambda: 8)  # It is closed before its first interval is over.
    short.close()
    assert logger.close() == 0
    for name in ("cpu_utilization_percentage", "system_memory_usage_megabytes", "disk_usage_percentage",
                 "network_receive_megabytes"):  # fmt: skip
        assert {7, 8} == metric_history(run, f"system/{name}").keys(), name
    assert 0.0 < metric_history(run, "system/system_memory_usage_percentage")[7] < 100.0
    loads = MlflowClient(uri).get_metric_history(run.run_id, "system/cpu_utilization_percentage")
    assert any(load.value > 0 for load in loads)
