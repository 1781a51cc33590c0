"""Test sweeps on a real Ray: a band search, a scheduler, failing trials, and a sweep that is killed and continued."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import sqlite3
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import ray
from killing import last_checkpoint
from mlflow import MlflowClient
from mlflow.entities import Run
from ray import cloudpickle
from support import ROOT, readme_lines, run_until, wait_for
from sweep_support import TINY

from jobs.engine.command_line import parse_preset
from jobs.engine.identity import with_fields
from jobs.studies.sweeps.launch import _export_best, make_sweep, run_sweep
from jobs.studies.sweeps.presets import PRESETS
from jobs.studies.sweeps.report import Row
from jobs.studies.sweeps.trainable import make_trainable

pytestmark = pytest.mark.cluster


@pytest.mark.long
@pytest.mark.parametrize("by", [signal.SIGINT])
def test_ctrl_c_ends_the_trials_too(cluster: dict[str, str], corpus: Path, tmp_path: Path, by: signal.Signals) -> None:
    words = [*(word.replace("DIR", str(corpus)) for word in TINY), f"--base.run.storage={tmp_path}"]
    arguments = ["gpt2-rho-lr-small", "--sweep.search", "band", *words]

    def runs() -> list[str]:
        """Returns the status of the sweep's run and, once it has begun, of the first trial's.

        The database is read directly, because MLflow would create its tables.
        """
        try:
            with sqlite3.connect(f"file:{tmp_path / 'mlflow.db'}?mode=ro", uri=True) as database:
                return [status for (status,) in database.execute("SELECT status FROM runs")]
        except sqlite3.OperationalError:
            return []

    status, said = run_until(lambda: len(runs()) == 2, "jobs.sweep", arguments, cluster, by=by)
    assert status == 130, said
    assert f"the same command goes on from what is in {tmp_path / 'rho'}" in said
    assert runs() == ["KILLED", "KILLED"]
    wait_for(lambda: ray.available_resources()["CPU"] == ray.cluster_resources()["CPU"], seconds=60)


def check_best_run(parent: Run, rows: Sequence[Row]) -> None:
    """Check that the sweep's run in MLflow has its best loss, mean τ, ρ, rate and trial."""
    best = min((row for row in rows if row.is_in_band), key=lambda row: row.loss)
    assert parent.data.tags["best_run"] == best.name
    assert {name: value for name, value in parent.data.metrics.items() if name.startswith("best_")} == {
        "best_cross_entropy_tau": best.loss, "best_tau_mean": best.tau_mean, "best_rho": best.point["temperature.rho"],
        "best_learning_rate_base": best.point["optimizer.learning_rate_base"],
    }  # fmt: skip


@pytest.mark.long
def test_a_band_search_is_watched_reported_and_found_again(
    cluster: dict[str, str], corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = {".venv/bin/python": sys.executable}
    (line,) = readme_lines(rf"{re.escape(sys.executable)} -m jobs\.sweep gpt2\S+ --sweep.search band", paths)
    # Relative paths refer to the directory in which the job is started, whatever directory its trials run in.
    words = [*(word.replace("DIR", os.path.relpath(corpus)) for word in TINY), f"--base.run.storage={tmp_path}"]
    words += ["--base.run.num-steps=40", "--base.validation.every=4"]
    config, _ = parse_preset(PRESETS, [*shlex.split(line)[3:], *words], job="sweep", purpose="")
    results = run_sweep(make_sweep(config))
    assert not results.failed
    shown = capsys.readouterr().out
    assert len(re.findall(r"^trial \d of at most 8 after .*: mean τ", shown, re.MULTILINE)) == len(results.rows)
    rows = {row.name: row for row in results.rows}
    in_band, worse = rows.pop("rho1.5-learning_rate_base0.003"), rows.pop("rho1.5-learning_rate_base0.5")
    assert (in_band.num_steps, in_band.stopped) == (40, "")
    assert in_band.is_in_band
    # It is killed soon after the step at which it was compared.
    assert 20 <= worse.num_steps < 40
    assert re.match(r"other trials are better at step 2\d: cross-entropy at τ", worse.stopped)
    assert not worse.is_in_band
    del rows["rho1.5-learning_rate_base0.001"]
    # The rest of the budget goes to a trial with the best rate.
    assert 1 <= len(rows) <= 2  # as many as the trials that were ended have left room for
    finer, *_ = rows.values()
    assert finer.point["optimizer.learning_rate_base"] == 3e-3
    assert finer.point["temperature.rho"] != 1.5
    # A trial that was ended early has released its worker.
    wait_for(lambda: ray.available_resources()["CPU"] == ray.cluster_resources()["CPU"], seconds=60)
    # The data are prepared once, beside the sweep.
    assert len(list((tmp_path / "prepared").iterdir())) == 2
    assert not list((tmp_path / "rho").glob("*/prepared"))
    written = json.loads((tmp_path / "rho" / "results.json").read_text())
    assert [row["tau_mean"] for row in written["rows"]] == [row.tau_mean for row in results.rows]
    assert [step for step, _, _ in in_band.history] == [*range(4, 41, 4)]
    table = pd.read_parquet(tmp_path / "rho" / "trials.parquet")
    assert len(table) == len(results.rows)
    assert {"config/temperature.rho", "config/optimizer.learning_rate_base", "config/run.seed"} <= set(table.columns)
    assert set(table["config/optimizer.learning_rate_tempnet"]) == {config.base.optimizer.learning_rate_tempnet}
    whole = table[table["step"] == 40].set_index("config/temperature.rho")
    assert whole.loc[finer.point["temperature.rho"], "tau_mean"] == finer.tau_mean
    assert set(table.columns) >= {"loss", "cross_entropy_tau", "tau_mean", "step", "checkpoint_path"}
    assert re.search(r"Chosen: <b>rho\S+-learning_rate_base0\.003</b>", (tmp_path / "rho" / "report.html").read_text())

    client = MlflowClient(results.tracking_uri)
    experiment = client.get_experiment_by_name("language-models")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    (parent,) = (run for run in runs if "mlflow.parentRunId" not in run.data.tags)
    assert sorted(run.info.run_name for run in runs if run is not parent) == sorted(row.name for row in results.rows)
    for run in runs:
        assert (run.data.tags["preset"], run.data.tags["paper.table"]) == ("gpt2-rho-lr-small", "TempNet, §6.1")
        assert run.data.tags["ray_job_id"] == ray.get_runtime_context().get_job_id()
    assert "| trial" in parent.data.tags["mlflow.note.content"]
    check_best_run(parent, results.rows)
    assert {file.path for file in client.list_artifacts(parent.info.run_id)} == {
        "results.md", "results.json", "report.html", "trials.parquet",
    }  # fmt: skip
    assert {run.info.status for run in runs} == {"FINISHED"}
    (stopped_run,) = (run for run in runs if run.info.run_name == worse.name)
    assert stopped_run.data.tags["stopped"] == worse.stopped

    # When the sweep is started again, nothing is trained.
    again = run_sweep(make_sweep(config))
    assert sorted(again.rows, key=str) == sorted(results.rows, key=str)
    assert len(client.search_runs([experiment.experiment_id])) == len(runs)


@pytest.mark.long
@pytest.mark.parametrize("scheduler", ["asha", "median"])
def test_a_scheduler_of_tune_ends_the_worse_trials_and_the_best_is_exported(
    cluster: dict[str, str], corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], scheduler: str
) -> None:
    words = [word.replace("DIR", str(corpus)) for word in TINY[: TINY.index("--sweep.axes")]]
    words += [
        f"--base.run.storage={tmp_path}", "--sweep.num-concurrent=1", f"--sweep.scheduler={scheduler}",
        "--base.run.num-steps=40", "--base.validation.every=4", "--sweep.band", "0.6", "1.6",
        "--sweep.axes", "optimizer.learning-rate-base=1e-3,3e-3,1e-5",
    ]  # fmt: skip
    config, _ = parse_preset(PRESETS, ["gpt2-rho-lr-small", *words], job="sweep", purpose="")
    results = run_sweep(make_sweep(config))
    assert f"3 (grid, scheduler {scheduler})" in capsys.readouterr().out
    assert not results.failed
    rows = {row.point["optimizer.learning_rate_base"]: row for row in results.rows}
    assert [(rows[rate].num_steps, rows[rate].stopped) for rate in (1e-3, 3e-3)] == [(40, ""), (40, "")]
    assert rows[3e-3].loss < rows[1e-3].loss < rows[1e-5].loss
    # It ends soon after the first validation after half of the steps, and keeps its checkpoint.
    assert 20 <= rows[1e-5].num_steps < 40
    assert rows[1e-5].stopped.startswith("ended early by ")
    directory = tmp_path / "rho" / rows[1e-5].name
    assert 20 <= last_checkpoint(directory) <= rows[1e-5].num_steps  # the newest may be whole and not noted yet
    client = MlflowClient(results.tracking_uri)
    experiment = client.get_experiment_by_name("language-models")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    assert [run.info.status for run in runs] == ["FINISHED"] * 4
    wait_for(lambda: ray.available_resources()["CPU"] == ray.cluster_resources()["CPU"], seconds=60)

    # The best trial is exported from its checkpoint if it is one that was ended early.
    for rate in (1e-3, 3e-3):
        shutil.rmtree(tmp_path / "rho" / rows[rate].name)
    _export_best(make_sweep(config), rows[1e-5])
    assert (tmp_path / "rho" / "export" / "config.json").is_file()


def grid_words(corpus: Path, storage: Path, rates: str, num_steps: int = 40) -> list[str]:
    """Returns the command line of a sweep of learning rates that runs one trial after the other."""
    words = [word.replace("DIR", str(corpus)) for word in TINY[: TINY.index("--sweep.axes")]]
    return [
        "gpt2-rho-lr-small", *words, f"--base.run.storage={storage}", f"--base.run.num-steps={num_steps}",
        "--base.run.checkpoint-every=4", "--base.run.max-restarts=1", "--base.validation.every=100",
        "--sweep.num-concurrent=1", "--sweep.axes", f"optimizer.learning-rate-base={rates}",
    ]  # fmt: skip


@pytest.mark.long
def test_a_killed_sweep_goes_on(
    cluster: dict[str, str], corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = grid_words(corpus, tmp_path, "1e-3,2e-3,3e-3")
    first, second, third = (tmp_path / "rho" / f"learning_rate_base{rate}" for rate in ("0.001", "0.002", "0.003"))
    status, said = run_until(lambda: last_checkpoint(second) >= 4, "jobs.sweep", words, cluster)
    assert status == -signal.SIGKILL, said
    assert not (second / "outcome.json").exists()
    assert not (tmp_path / "rho" / "results.json").exists()
    before = (first / "outcome.json").stat().st_mtime_ns

    config, _ = parse_preset(PRESETS, words, job="sweep", purpose="")
    results = run_sweep(make_sweep(config))
    assert "trials finished before: 1" in capsys.readouterr().out
    assert not results.failed
    assert (first / "outcome.json").stat().st_mtime_ns == before
    outcomes = [json.loads((trial / "outcome.json").read_text()) for trial in (first, second, third)]
    assert [outcome["num_steps"] for outcome in outcomes] == [40, 40, 40]
    assert outcomes[1]["resumed_from_step"] >= 4
    assert outcomes[2]["resumed_from_step"] == 0

    written = json.loads((tmp_path / "rho" / "results.json").read_text())
    assert sorted(row["name"] for row in written["rows"]) == [trial.name for trial in (first, second, third)]
    written["rows"].sort(key=lambda row: row["name"])
    assert [row["tau_mean"] for row in written["rows"]] == [outcome["validation"]["tau_mean"] for outcome in outcomes]
    assert written["failed"] == {}
    client = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("language-models")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    (parent,) = (run for run in runs if "mlflow.parentRunId" not in run.data.tags)
    children = [run for run in runs if run.data.tags.get("mlflow.parentRunId") == parent.info.run_id]
    assert sorted(run.info.run_name for run in children) == sorted(trial.name for trial in (first, second, third))
    assert {run.info.status for run in runs} == {"FINISHED"}
    assert len(runs) == 4


def test_what_tune_writes_of_a_trial_holds_no_login(cluster: dict[str, str]) -> None:
    base: Any = with_fields(PRESETS["gpt2-rho-lr-small"]().base, {"tracking.uri": "http://me:hunter2@h"})
    assert b"hunter2" in cloudpickle.dumps(base)
    assert b"hunter2" not in cloudpickle.dumps(make_trainable(base))


@pytest.mark.long
def test_the_lines_of_python_on_the_page_run_with_a_search_and_a_scheduler_of_tune(
    cluster: dict[str, str], corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (lines,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "sweeps.md").read_text(), re.DOTALL)
    words = [word.replace("DIR", str(corpus)) for word in TINY[: TINY.index("--sweep.axes")]]
    words += [f"--base.run.storage={tmp_path}", "--base.tracking.no-enabled", "--base.run.num-steps=4"]
    config, _ = parse_preset(PRESETS, ["gpt2-rho-lr-small", *words], job="sweep", purpose="")
    tiny = {
        'PRESETS["gpt2-rho-lr-small"]()': "config", "num_samples=4": "num_samples=2", "max_t=300": "max_t=4",
        "grace_period=100": "grace_period=2", "tune_config=settings": "tune_config=settings, run_config={}",
    }  # fmt: skip
    for before, after in tiny.items():
        assert before in lines
        lines = lines.replace(before, after)
    found: dict[str, Any] = {"config": config}
    exec(lines.replace("run_config={}", f"run_config=tune.RunConfig(storage_path={str(tmp_path / 'tune')!r})"), found)
    table = found["grid"].get_dataframe()
    assert len(table) == 2
    assert (table["step"] >= 2).all()
    runs = {path.parent.name for path in (tmp_path / "rho").glob("*/checkpoints.json")}
    assert {f"{rho:.12g}" for rho in table["config/temperature.rho"]} == {
        re.findall(r"^rho([\d.]+)-", name)[0] for name in runs
    }
