"""Tests that MLflow's list of runs begins with the metrics that decide, and its charts with the courses of a run."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow_support import Server

from jobs.engine.metrics import MetricLogger
from jobs.engine.recording import run_columns
from jobs.engine.run_view import add_columns, metric_column, tag_column, where_to_browse
from jobs.engine.tracking import TrackedRun, finish_run, open_run
from jobs.studies.sweeps.report import best_values
from tests.jobs.browser_support import CHROMIUM, open_page

VIEW, NOTE = "mlflow.sharedViewState.figures", "mlflow.note.content"
SCORES = ("cross_entropy_tau", "tau_mean", "span_recall@1")


def open_for(uri: str, name: str, columns: list[str]) -> TrackedRun:
    return open_run(
        uri=uri, experiment="tests", name=name, directory=f"/runs/{name}", parameters={}, tags={}, data_sets={},
        columns=columns,
    )  # fmt: skip


def test_columns_are_added_behind_those_of_earlier_runs(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    client = MlflowClient(uri)
    run = open_for(uri, "a", run_columns(SCORES))
    expected = [
        "metrics.`validation/cross_entropy_tau`", "metrics.`validation/tau_mean`", "metrics.`validation/span_recall_at_1`",
        "metrics.`verdict/beats_both_constants`",
    ]  # fmt: skip
    tags = client.get_experiment(run.experiment_id).tags
    assert json.loads(tags[VIEW])["columnOrder"] == expected
    assert f"(#/experiments/{run.experiment_id}/runs?viewStateShareKey=figures" in tags[NOTE]

    client.set_experiment_tag(run.experiment_id, NOTE, "what Ann has written")
    sweep = [*run_columns(SCORES[:1]), metric_column("best_rho"), tag_column("best_run"), metric_column("best_rho")]
    assert open_for(uri, "b", sweep).experiment_id == run.experiment_id
    tags = client.get_experiment(run.experiment_id).tags
    view = json.loads(tags[VIEW])
    assert view["columnOrder"] == [*expected, "metrics.`best_rho`", "tags.`best_run`"]
    assert set(view["columnOrder"]) == set(view["columnWidths"]) < set(view["selectedColumns"])
    assert tags[NOTE] == "what Ann has written"


def test_a_view_that_has_all_columns_is_not_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    client = MlflowClient(uri)
    run = open_for(uri, "a", run_columns(SCORES))

    def refuse(*arguments: str) -> None:
        raise PermissionError(arguments)

    monkeypatch.setattr(MlflowClient, "set_experiment_tag", refuse)
    add_columns(client, run.experiment_id, reversed(run_columns(SCORES)))
    add_columns(client, run.experiment_id, [])
    with pytest.raises(PermissionError):
        add_columns(client, run.experiment_id, ["metrics.`another`"])
    # A login that may not change the experiment can still log runs.
    assert open_for(uri, "b", ["metrics.`another`"]).experiment_id == run.experiment_id


def test_a_person_is_told_what_to_open_or_to_type() -> None:
    page = "/#/experiments/7/runs?viewStateShareKey=figures&workflowType=machine_learning"
    assert where_to_browse("http://mlflow:5000/", "7") == f"  http://mlflow:5000{page}"
    assert where_to_browse("http://mlflow:5000", None) == "  http://mlflow:5000"
    command, address = where_to_browse("sqlite:////runs/mlflow.db", "7").splitlines()
    assert command.endswith("--backend-store-uri sqlite:////runs/mlflow.db")
    assert address == f"  and open http://127.0.0.1:5000{page}"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """Return the address of an MLflow server."""
    started = Server(tmp_path)
    started.start()
    yield started.uri
    started.kill()


HEADERS = """[...document.querySelectorAll('.ag-header-cell')].sort(
    (a, b) => a.getBoundingClientRect().left - b.getBoundingClientRect().left).map(cell => cell.innerText.trim())"""
WORDS = "document.body.innerText.split(/\\s+/).join(' ')"
CELLS = "[...document.querySelectorAll('.ag-cell')].map(cell => cell.innerText.trim())"


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_in_a_browser(server: str, tmp_path: Path) -> None:
    axes = ("temperature.rho", "optimizer.learning_rate_base")
    sweep = open_for(server, "rho", [*run_columns(SCORES), *map(metric_column, best_values(axes, None))])
    for number, name in enumerate(("a", "b")):
        run = open_for(server, name, run_columns(SCORES))
        logger = MetricLogger(run, warn=print)
        for step in (1, 2):
            logger.log({f"validation/{score}": step + number / 4 for score in SCORES}, step)
            logger.log({"train/loss": 1 / step, "train/learning_rate/base": 0.1 / step}, step)
        assert logger.close() == 0
        finish_run(
            run,
            status="FINISHED",
            artifacts=None,
            metrics={"verdict/beats_both_constants": 1.0, "verdict/robust/loss": 3.0},
        )
    finish_run(sweep, status="FINISHED", artifacts=None, metrics=dict.fromkeys(best_values(axes, None), 0.625))

    async def look() -> tuple[list[str], list[str], str]:
        async with open_page(where_to_browse(server, sweep.experiment_id).strip(), tmp_path / "browser", 3000) as page:
            await page.wait_for(f"{HEADERS}.includes('best_rho')")
            headers, cells = await page.run(HEADERS), await page.run(CELLS)
            charts = where_to_browse(server, sweep.experiment_id).strip() + "&compareRunsMode=CHART"
            await page.call("Page.navigate", url=charts)
            await page.wait_for(f"{WORDS}.includes('verdict (1)')")
            return headers, cells, await page.run(WORDS)

    headers, cells, charts = asyncio.run(look())
    names = [name for name in headers if "/" in name or name.startswith("best_")]
    assert names == [
        "validation/cross_entropy_tau", "validation/tau_mean", "validation/span_recall_at_1",
        "verdict/beats_both_constants", "best_cross_entropy_tau", "best_tau_mean", "best_rho", "best_learning_rate_base",
    ]  # fmt: skip
    assert {"2", "2.25", "0.625", "1"} <= set(cells)
    places = [
        charts.index(section) for section in ("validation (3)", "train (1)", "train/learning_rate (1)", "verdict (1)")
    ]
    assert places == sorted(places)
