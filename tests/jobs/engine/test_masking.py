"""Tests that the password of a tracking URI is never printed, logged or recorded, and is still used."""

from __future__ import annotations

import base64
import dataclasses
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from jobs.engine.command_line import fail, run_job
from jobs.engine.config import RunSection, TrackingSection
from jobs.engine.description import describe_plan
from jobs.engine.export import write_task
from jobs.engine.identity import flatten
from jobs.engine.launch import claim_directory
from jobs.engine.masking import masked
from jobs.engine.metrics import MetricLogger, TrackedRun, survive_outage
from jobs.engine.tracking import open_run, reconnection_uri, resolve_uri, where_to_browse
from jobs.scoring.language_models.config import EvaluateConfig
from jobs.scoring.results import publish_evaluation
from jobs.studies.trials import describe_error
from jobs.studies.trials import publish as publish_trials
from jobs.tasks.presets.language_models import PRESETS

SECRET = "hunter2"


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


class _Server(BaseHTTPRequestHandler):
    """This server refuses every request, as if the login were mistyped, but it answers."""

    seen: list[tuple[str, str]]

    def do_GET(self) -> None:
        self.seen.append((self.path, self.headers.get("Authorization", "")))
        self.send_response(403 if self.path == "/health" else 401)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_POST = do_GET

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Yields the URI, with a login, of a real server on this machine."""
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


@pytest.mark.parametrize("uri", [f"http://me:{SECRET}@127.0.0.1:9", f"ftp://me:{SECRET}@h"])
def test_a_server_that_is_not_there(
    uri: str, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises((ConnectionError, ValueError), match=r"://\*\*\*@") as refused:
        resolve_uri(TrackingSection(uri=uri), "/runs")
    with pytest.raises(SystemExit):
        fail(f"of {uri}")
    if uri.startswith("http"):
        assert resolve_uri(TrackingSection(uri=uri, optional=True), "/runs") == ""
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
    publish_evaluation(evaluation, uri="", columns=[], render=str, identity=[], failed={})
    written += (tmp_path / "a" / "results.json").read_text()
    written += describe_plan(
        config, about={}, num_units=1, unit="x", parameters="", num_trained=0, tracking_uri=secret.uri
    )  # fmt: skip
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
