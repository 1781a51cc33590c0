"""Test that a run has one run in MLflow, that an outage loses and stops nothing, and that a password is shown to nobody."""

from __future__ import annotations

import base64
import dataclasses
import json
import logging
import multiprocessing
import re
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from support import wait_for

from jobs.engine.command_line import fail, reach_loopback_directly, run_job
from jobs.engine.config import RunSection, TrackingSection
from jobs.engine.export import write_task
from jobs.engine.fields import flatten, with_fields
from jobs.engine.launch import END_FILE, claim_directory, record_end
from jobs.engine.masking import masked
from jobs.engine.metrics import MetricLogger, TrackedRun, metric_history, survive_outage
from jobs.engine.tracking import (
    check_experiment,
    find_or_create_experiment,
    finish_run,
    log_data_sets,
    mark_if_ended,
    open_client,
    open_run,
    reconnection_uri,
    resolve_uri,
    sqlite_file,
    where_to_browse,
)
from jobs.scoring import units
from jobs.scoring.language_models.config import EvaluateConfig
from jobs.scoring.mlflow_models import record_models
from jobs.scoring.results import publish_evaluation
from jobs.studies.trials import describe_error
from jobs.studies.trials import publish as publish_trials
from jobs.tasks.presets.language_models import PRESETS
from jobs.tasks.sentence_encoder.plan import SentencePlan
from pipelines.storage import write_json

SECRET = "hunter2"


def open_for(uri: str, directory: str, **tags: str) -> TrackedRun:
    return open_run(
        uri=uri, experiment="tests", name=directory, directory=directory, parameters={"rho": 3.0},
        tags={"configuration_hash": "abc", **tags}, data_sets={"training": ("prose", "0123", "/data/prose")},
    )  # fmt: skip


def test_a_directory_has_one_run_however_often_it_is_opened(mlflow_uri: str, tmp_path: Path) -> None:
    first = open_for(mlflow_uri, "/runs/a")
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "file.txt").write_text("x")
    finish_run(first, status="FAILED", artifacts=tmp_path / "report", metrics={"verdict/x": 1.0}, note="**y**")
    for job in ("one", "two", "one"):
        assert open_for(mlflow_uri, "/runs/a", ray_job_id=job) == first
    assert open_for(mlflow_uri, "/runs/b") != first
    assert open_for(mlflow_uri, "/runs/a", configuration_hash="def") != first  # the directory was deleted
    run = MlflowClient(mlflow_uri).get_run(first.run_id)
    assert run.info.status == "RUNNING"
    assert run.data.params == {"rho": "3.0"}
    assert run.data.tags["configuration_hash"] == "abc"
    assert run.data.tags["ray_job_id"] == "one, two"
    assert run.data.tags["mlflow.note.content"] == "**y**"
    assert run.data.tags["mlflow.user"]
    assert len(run.data.tags["git.revision"]) == 40
    assert run.inputs.dataset_inputs[0].dataset.digest == "0123"
    assert [artifact.path for artifact in MlflowClient(mlflow_uri).list_artifacts(first.run_id)] == ["file.txt"]


@pytest.mark.parametrize(("error", "status"), [(KeyboardInterrupt, "KILLED"), (OSError, "FAILED")])
def test_what_an_error_or_ctrl_c_ends_is_not_left_running(
    mlflow_uri: str, error: type[BaseException], status: str, tmp_path: Path
) -> None:
    parent = open_for(mlflow_uri, str(tmp_path / "sweep"))
    under = {"mlflow.parentRunId": parent.run_id}
    going, done = (open_for(mlflow_uri, str(tmp_path / name), **under) for name in ("going", "done"))
    finish_run(done, status="FINISHED", artifacts=None, metrics={})
    other = open_for(mlflow_uri, str(tmp_path / "another's"))
    with pytest.raises(error), mark_if_ended(None), mark_if_ended(parent):
        raise error
    with pytest.raises(OSError, match="lost"), mark_if_ended(going):
        raise OSError("Ray has lost an actor, which it has taken away")
    client = MlflowClient(mlflow_uri)
    found = [client.get_run(run.run_id).info.status for run in (parent, going, done, other)]
    assert found == [status, status, "FINISHED", "RUNNING"]


def test_metrics_arrive_and_the_last_value_of_a_step_counts(mlflow_uri: str) -> None:
    run = open_for(mlflow_uri, "/runs/metrics")
    warnings: list[str] = []
    logger = MetricLogger(run, warn=warnings.append, seconds_between_sends=0.05)
    for step in range(1, 1201):
        logger.log({"loss": 1.0 / step, "undefined": float("nan")}, step)
    assert logger.close() == 0
    again = MetricLogger(run, warn=warnings.append)
    again.log({"loss": 7.0}, 1200)
    assert again.close() == 0
    history = metric_history(run, "loss")
    assert len(history) == 1200
    assert history[10] == pytest.approx(0.1)
    assert history[1200] == 7.0
    assert metric_history(run, "undefined") == {}
    assert not warnings


@pytest.mark.parametrize("hangs", [False, True])
def test_an_outage_keeps_the_values_which_can_be_sent_later(
    mlflow_uri: str, hangs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody listens, or who listens never answers, which does not hold the end of a run."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    if not hangs:
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    warnings: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1] if hangs else 9
        uri = f"http://127.0.0.1:{port}"
        away = MetricLogger(TrackedRun(uri=uri, run_id="0" * 32), warn=warnings.append, seconds_between_sends=0.05)
        away.log({"loss": 2.5}, 3)
        if not hangs:
            wait_for(lambda: any("unreachable" in warning for warning in warnings), seconds=60)
        started = time.monotonic()
        assert away.close(seconds=0.3) == 1
        assert time.monotonic() - started < 20
    assert any("1 metric values could not be sent" in warning for warning in warnings)
    run = open_for(mlflow_uri, "/runs/outage")
    for _ in range(2):  # Sending the values twice does no harm.
        back = MetricLogger(run, warn=warnings.append)
        back.resend(away.unsent())
        assert back.close() == 0
    assert metric_history(run, "loss") == {3: 2.5}


class _Server(BaseHTTPRequestHandler):
    """This server refuses every request, as if the login were mistyped, but it answers."""

    seen: list[tuple[str, str]] = []  # noqa: RUF012 - of each test anew

    def do_GET(self) -> None:
        self.seen.append((self.path, self.headers.get("Authorization", "")))
        self.send_response(403 if self.path.endswith("/health") else 401)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_POST = do_GET

    def log_message(self, *arguments: Any) -> None:
        pass


def test_a_proxy_that_hides_a_server_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Server) as proxy:
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{proxy.server_port}"
        monkeypatch.setenv("http_proxy", address)
        monkeypatch.setenv("no_proxy", "")
        monkeypatch.setattr(urllib.request, "_opener", None)  # which keeps the proxies of the first call
        message = rf"The proxy {address} is asked .*: HTTP Error 403.* add mlflow\.example to the variable no_proxy"
        with pytest.raises(ConnectionError, match=message):
            resolve_uri(TrackingSection(uri="http://mlflow.example:5000"), "/runs")
        proxy.shutdown()


@pytest.mark.parametrize(
    ("variables", "spared"),
    [
        ({}, None),
        ({"HTTP_PROXY": "http://proxy:3128"}, "localhost,127.0.0.1,::1"),
        ({"https_proxy": "http://proxy:3128", "no_proxy": ".org,localhost"}, ".org,localhost,127.0.0.1,::1"),
        ({"http_proxy": "http://proxy:3128", "NO_PROXY": "*"}, "*"),
    ],
)
def test_servers_of_this_machine_are_reached_without_a_proxy(variables: dict[str, str], spared: str | None) -> None:
    reach_loopback_directly(variables)
    assert variables.get("NO_PROXY") == spared
    assert variables.get("no_proxy") in (spared, "localhost,127.0.0.1,::1")


def test_a_deleted_experiment_is_named_with_the_ways_out(mlflow_uri: str) -> None:
    client = MlflowClient(mlflow_uri)
    client.delete_experiment(client.create_experiment("old"))
    message = r"experiment = 'old' was deleted .* restore -x \d+, or .*tracking\.experiment"
    with pytest.raises(ValueError, match=message):
        check_experiment(mlflow_uri, "old")
    with pytest.raises(ValueError, match=message):
        find_or_create_experiment(client, mlflow_uri, "old")
    check_experiment(mlflow_uri, "new")


def test_the_default_store_lies_beside_the_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    assert resolve_uri(TrackingSection(uri="sqlite:///a.db"), "/runs") == f"sqlite:///{tmp_path}/a.db"
    assert resolve_uri(TrackingSection(), "/a/runs") == "sqlite:////a/runs/mlflow.db"
    with pytest.raises(ValueError, match=r"no local directory .* --tracking\.no-enabled"):
        resolve_uri(TrackingSection(), "s3://bucket")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:////b.db")
    assert resolve_uri(TrackingSection(), "s3://bucket") == "sqlite:////b.db"


def test_the_default_store_is_found_whatever_its_name_is(
    mlflow_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    storage = tmp_path / "new" / "a b\t#p%41? {x}"
    storage.mkdir(parents=True)
    sqlite_file(mlflow_uri).rename(storage / "mlflow.db")
    uri = resolve_uri(TrackingSection(), str(storage))
    client = open_client(uri)
    experiment = client.get_experiment(find_or_create_experiment(client, uri, "ours"))
    client.log_text(client.create_run(experiment.experiment_id).info.run_id, "text", "a.txt")
    assert [path.name for path in (tmp_path / "new").iterdir()] == [storage.name]
    assert len(list((storage / "mlartifacts").rglob("a.txt"))) == 1


def test_what_an_outage_kept_back_is_sent_by_the_same_command(
    mlflow_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = with_fields(PRESETS["gpt2-scratch-small"](), {"run.name": "a", "run.storage": str(tmp_path)})
    report = Path(config.run.directory) / "report"
    report.mkdir(parents=True)
    Path(config.run.export_directory).mkdir()
    (report / "summary.txt").write_text("fine")
    tracked = open_for(mlflow_uri, config.run.directory)
    client = MlflowClient(mlflow_uri)
    now = int(time.time() * 1000)
    unsent = [["train/loss", 1.0 / step, now, step] for step in range(1, 1201)]
    outcome: dict[str, Any] = {
        "tracking_uri": mlflow_uri, "mlflow_run_id": tracked.run_id, "rivals": {"robust/x": 0.5}, "num_steps": 1200,
        "temperature_verdict": "constant", "store_retries": 2, "batches_digest": "0123",
    }  # fmt: skip
    write_json(f"{config.run.directory}/{END_FILE}", {"unsent_metrics": unsent, "note": "**fine**"})
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
        assert run.data.tags["mlflow.note.content"] == "**fine**"
        assert run.data.tags["temperature.verdict"] == "constant"
        assert run.data.tags["batches_digest"] == "0123"
        figures = {name: run.data.metrics[f"verdict/{name}"] for name in ("robust/x", "beats_both_constants")}
        assert figures == {"robust/x": 0.5, "beats_both_constants": 0.0}
        assert run.data.metrics["store_retries"] == 2
        assert [file.path for file in client.list_artifacts(tracked.run_id)] == ["summary.txt"]
        assert metric_history(tracked, "train/loss") == {step: 1.0 / step for step in range(1, 1201)}
    client.set_terminated(tracked.run_id, status="KILLED")
    record_end(config, outcome, record_models)
    assert client.get_run(tracked.run_id).info.status == "KILLED"


def test_a_store_an_experiment_and_a_data_set_are_made_once_by_processes_that_do_so_together(tmp_path: Path) -> None:
    """The first client of a store makes its tables, in many steps of which none may be made twice."""
    uri, number_of_processes = f"sqlite:///{tmp_path}/new/mlflow.db", 3
    # Forks, because a new process would first import MLflow for seconds.
    context = multiprocessing.get_context("fork")
    barrier, told = context.Barrier(number_of_processes, timeout=120), context.Queue()

    def make() -> None:
        logging.disable(logging.CRITICAL)
        barrier.wait()
        try:
            own = open_client(uri)
            run = own.create_run("0").info.run_id
            for number in range(8):
                barrier.wait()
                assert find_or_create_experiment(own, uri, f"experiment {number}") == str(number + 1)
                log_data_sets(own, run, {"training": ("prose", f"{number:04}", "/data/prose")})
            told.put((run, ""))
        except Exception as error:
            barrier.abort()
            told.put(("", repr(error)))

    processes = [context.Process(target=make, daemon=True) for _ in range(number_of_processes)]
    for process in processes:
        process.start()
    runs, errors = zip(*(told.get(timeout=120) for _ in processes), strict=True)
    for process in processes:
        process.join()
    assert set(errors) == {""}
    client = MlflowClient(uri)
    for run in runs:
        inputs = client.get_run(run).inputs.dataset_inputs
        assert sorted(item.dataset.digest for item in inputs) == [f"{number:04}" for number in range(8)]


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        (f"http://me:{SECRET}@mlflow:5000", "http://***@mlflow:5000"),
        (f"http://{SECRET}@mlflow", "http://***@mlflow"),
        (f"https://me:p@{SECRET}@mlflow/x", "https://***@mlflow/x"),
        (f"postgresql+psycopg://u:a/{SECRET}@h/db", "postgresql+psycopg://***@h/db"),
        (f"postgresql://h/db?user=u&password={SECRET}&sslmode=require", "postgresql://h/db?user=u&password=***&sslmode=require"),
        (f"mssql+pyodbc:///?odbc_connect=PWD%3D{SECRET}", "mssql+pyodbc:///?odbc_connect=***"),
        (f"https://a.blob/c?sv=1&sig={SECRET}&se=2", "https://a.blob/c?sv=1&sig=***&se=2"),
        (f"https://b.s3/k?X-Amz-Credential={SECRET}&X-Amz-Signature={SECRET}",
         "https://b.s3/k?X-Amz-Credential=***&X-Amz-Signature=***"),
        (f"https://h/x#access_token={SECRET}&state=1", "https://h/x#access_token=***&state=1"),
        ("https://h/x?sigma=1&design=2", "https://h/x?sigma=1&design=2"),
        ("sqlite:////runs/mlflow.db", "sqlite:////runs/mlflow.db"),
        ("http://mlflow:5000", "http://mlflow:5000"),
        ("s3://bucket/a@b", "s3://bucket/a@b"),
    ],
)  # fmt: skip
def test_what_is_shown_of_a_uri(uri: str, shown: str) -> None:
    assert masked(uri) == shown
    assert masked(masked(uri)) == shown
    assert masked(f"API request to '{uri}' failed, write to a@b") == f"API request to '{shown}' failed, write to a@b"
    assert masked({"x": [uri, 1, ("y", uri)], "z": None}) == {"x": [shown, 1, ("y", shown)], "z": None}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    _Server.seen = []
    with ThreadingHTTPServer(("127.0.0.1", 0), _Server) as listener:
        thread = threading.Thread(target=listener.serve_forever)
        thread.start()
        yield f"http://me:{SECRET}@127.0.0.1:{listener.server_port}"
        listener.shutdown()
        thread.join()


def open_tests(uri: str, **parameters: Any) -> TrackedRun:
    return open_run(
        uri=uri, experiment="tests", name="a", directory="/runs/a", parameters=parameters, tags={},
        data_sets={"training": ("x", "0", f"s3://key:{SECRET}@bucket/x")},
    )  # fmt: skip


def test_a_server_gets_the_login_and_nobody_else_sees_it(server: str, caplog: pytest.LogCaptureFixture) -> None:
    assert resolve_uri(TrackingSection(uri=server), "/runs") == server
    assert _Server.seen == [("/health", "")]
    with pytest.raises(ConnectionError, match=r"MLflow at http://\*\*\*@127") as refused:
        open_tests(server)
    assert SECRET not in str(refused.value)
    assert refused.value.__suppress_context__
    path, login = _Server.seen[-1]
    assert path.startswith("/api/")
    assert base64.b64decode(login.removeprefix("Basic ")).decode() == f"me:{SECRET}"
    warnings: list[str] = []
    metrics = MetricLogger(TrackedRun(uri=server, run_id="0" * 32), warn=warnings.append, seconds_between_sends=0.05)
    metrics.log({"x": 1.0}, 1)
    assert metrics.close(seconds=0.5) == 1
    with survive_outage("the end"):
        open_tests(server)
    assert warnings
    assert "the end" in caplog.text
    assert SECRET not in "".join(warnings) + caplog.text


@pytest.mark.parametrize(
    "uri", [f"http://me:{SECRET}@127.0.0.1:9", f"http://me:{SECRET}@127.0.0.1:9x", f"ftp://me:{SECRET}@h"]
)
def test_a_server_that_is_not_there(
    uri: str, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises((ConnectionError, ValueError), match=r"://\*\*\*@") as refused:
        resolve_uri(TrackingSection(uri=uri), "/runs")
    with pytest.raises(SystemExit):
        fail(f"of {uri}")
    if uri.startswith("http"):
        assert re.search(r"tracking\.uri = '\S+' does not answer: .*--tracking\.optional", str(refused.value))
        assert resolve_uri(TrackingSection(uri=uri, optional=True), "/runs") == ""
        assert "nothing is logged" in caplog.text
    assert resolve_uri(TrackingSection(uri=uri, enabled=False), "/runs") == ""
    shown = (
        f"{refused.value}{caplog.text}{capsys.readouterr().err}{TrackingSection(uri=uri)!r}{where_to_browse(uri, '1')}"
    )
    assert SECRET not in shown
    with pytest.raises(ValueError, match="white space"):
        resolve_uri(TrackingSection(uri=f"{uri} "), "/runs")


def test_a_traceback(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def main(arguments: Any) -> int:
        raise KeyError(f"postgresql://u:{SECRET}@h/db")

    with pytest.raises(SystemExit) as ended:
        run_job(main)
    said = capsys.readouterr().err
    assert ended.value.code == 1
    assert "KeyError" in said
    assert SECRET not in said


def test_what_is_recorded(mlflow_uri: str, tmp_path: Path) -> None:
    """Every writer masks the password: for parameters and data sets in MLflow, for trials, evaluations and plans."""
    secret = TrackingSection(uri=f"http://me:{SECRET}@h", enabled=False)
    config = dataclasses.replace(PRESETS["gpt2-scratch-small"](), tracking=secret)
    run = RunSection(name="a", storage=str(tmp_path))
    tracked = open_tests(mlflow_uri, **flatten(config))
    found = MlflowClient(tracked.uri).get_run(tracked.run_id)
    assert found.data.params["tracking.uri"] == "http://***@h"
    assert found.inputs.dataset_inputs[0].dataset.source == json.dumps({"uri": "s3://***@bucket/x"})
    (tmp_path / "a").mkdir()
    reason = describe_error(ValueError(f"no {secret.uri}"))
    publish_trials(
        dataclasses.replace(config, run=run), None, rows=[], table="", content={}, metrics={}, failed={"b": reason}
    )
    written = (tmp_path / "a" / "results.json").read_text()
    assert json.loads(written)["failed"] == {"b": "no http://***@h"}
    (tmp_path / "text.txt").touch()
    evaluation = EvaluateConfig(
        models=("m",), wikitext=str(tmp_path / "text.txt"), name="a", storage=str(tmp_path), tracking=secret
    )
    labels = units.model_labels([f"s3://me:{SECRET}@b/{name}/export?key={SECRET}" for name in ("a", "a", "b")])
    assert labels == ["s3://***@b/a/export (1)", "s3://***@b/a/export (2)", "b"]
    table = " ".join([*labels, units.describe_error(ValueError(f"no {secret.uri}"))])
    results = publish_evaluation(evaluation, uri="", columns=[], table=table, identity=["a"], failed={})
    assert results.identity == "5153fd05f520"  # by which a later release finds the same run
    written += (tmp_path / "a" / "results.json").read_text()
    plan = SentencePlan(config=config, tracking_uri=secret.uri, num_parameters=0, num_tempnet_parameters=0)
    written += plan.describe_lines(about={}, num_units=1, parameters="", num_trained=0)
    assert written.count("http://***@h") == 4
    for password in (SECRET, f"{SECRET}-renewed"):  # which does not make it another run
        data = dataclasses.replace(config.data, train=f"s3://me:{password}@bucket/x")
        claimed = dataclasses.replace(config, data=data, run=dataclasses.replace(run, name="claimed"))
        claim_directory(claimed)
        write_task(claimed)
    for file in tmp_path.rglob("*"):
        assert not file.is_file() or SECRET.encode() not in file.read_bytes(), file


def test_who_continues_a_run_has_the_login_again(monkeypatch: pytest.MonkeyPatch) -> None:
    uri = f"http://me:{SECRET}@h"
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert reconnection_uri("http://***@h", TrackingSection(uri=uri)) == uri
    assert reconnection_uri("sqlite:////x", TrackingSection(uri=uri)) == "sqlite:////x"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    assert reconnection_uri("http://***@h", TrackingSection()) == uri
