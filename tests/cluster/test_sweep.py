"""Test sweeps on a real Ray: searches, schedulers of Tune, a population, and a sweep that is interrupted and goes on."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from ray import cloudpickle
from readme_support import lines_like, run_line
from support import (
    LANGUAGE_MODEL_OPTIONS,
    ROOT,
    configure,
    last_checkpoint,
    run_until,
    runs_of,
    sweep_runs,
    wait_for_free_cpus,
)

from jobs.engine.fields import with_fields
from jobs.studies.sweeps.launch import _export_best, make_sweep, run_sweep
from jobs.studies.sweeps.presets import PRESETS
from jobs.studies.sweeps.report import Row
from jobs.studies.sweeps.trainable import make_trainable

pytestmark = pytest.mark.cluster

RATE = "optimizer.learning_rate_base"
BAND = ["--sweep.band", "0.6", "1.6"]


def tiny_words(corpus: str | Path, storage: Path, num_steps: int, validate_every: int) -> list[str]:
    """Return the arguments of a sweep of tiny language models, without axes."""
    return [
        "gpt2-rho-lr-small", "--base.run.name=rho", "--base.run.max-restarts=0", f"--base.data.train={corpus}/train",
        f"--base.data.validation={corpus}/validation", f"--base.data.tokenizer={corpus}/tokenizer",
        "--base.data.context-length=64", "--base.model.hidden-size=64", "--base.model.num-layers=2",
        "--base.model.num-heads=4", "--base.workers.num-workers=1", "--base.workers.zero-stage=0",
        "--base.workers.num-threads=1", "--base.validation.num-oracle-tokens=512", "--base.temperature.hidden-size=32",
        "--base.temperature.num-prototypes=16", "--base.temperature.rho=1", "--base.optimizer.batch-size=8",
        "--base.run.checkpoint-every=100", f"--base.run.storage={storage}", f"--base.run.num-steps={num_steps}",
        f"--base.validation.every={validate_every}",
    ]  # fmt: skip


def resolve(words: list[str]) -> Any:
    return make_sweep(configure(PRESETS, words))


def test_sweeping_some_values(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short = ["--run.num-steps=4", "--validation.every=4", "--temperature.target-entropy=None"]
    options = [option.replace("--", "--base.", 1) for option in [*LANGUAGE_MODEL_OPTIONS, *short]]
    (line,) = lines_like("jobs.sweep * --sweep.axes temperature.rho=2,2.5,3")
    run_line(line, *options, "--sweep.axes", "temperature.rho=2,3")
    rows = json.loads((home / "runs" / "gpt2-rho-lr-small" / "results.json").read_text())["rows"]
    assert [row["point"] for row in rows] == [{"temperature.rho": rho} for rho in (2.0, 3.0)]
    assert all(row["num_steps"] == 4 for row in rows)
    assert len(re.findall(r"mean τ \d", capsys.readouterr().out)) >= 2


@pytest.mark.long
def test_ctrl_c_ends_the_trials_too_and_the_sweep_goes_on(
    cluster: dict[str, str], corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What SIGKILL does to a run is tested in test_train_lm.py."""
    words = [
        *tiny_words(corpus, tmp_path, 40, 100), "--base.run.checkpoint-every=4", "--base.run.max-restarts=1",
        "--sweep.num-concurrent=1", "--sweep.axes", f"{RATE}=1e-3,2e-3,3e-3",
    ]  # fmt: skip
    first, second, third = (tmp_path / "rho" / f"learning_rate_base{rate}" for rate in ("0.001", "0.002", "0.003"))
    log = tmp_path / "log"
    status = run_until(lambda: last_checkpoint(second) >= 4, ["jobs.sweep", *words], cluster, log, by=signal.SIGINT)
    said = log.read_text()
    assert status == 130, said
    assert f"the same command goes on from what is in {tmp_path / 'rho'}" in said
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    assert {run.info.run_name: run.info.status for run in runs_of(uri, "language-models")} == {
        "rho": "KILLED", first.name: "FINISHED", second.name: "KILLED"
    }  # fmt: skip
    wait_for_free_cpus()
    assert not (tmp_path / "rho" / "results.json").exists()
    before = (first / "outcome.json").stat().st_mtime_ns

    assert not run_sweep(resolve(words)).failed
    assert "trials finished before: 1" in capsys.readouterr().out
    assert (first / "outcome.json").stat().st_mtime_ns == before
    outcomes = [json.loads((trial / "outcome.json").read_text()) for trial in (first, second, third)]
    assert [outcome["num_steps"] for outcome in outcomes] == [40, 40, 40]
    assert outcomes[1]["resumed_from_step"] >= 4
    assert outcomes[2]["resumed_from_step"] == 0
    rows = json.loads((tmp_path / "rho" / "results.json").read_text())["rows"]
    assert {row["name"]: row["tau_mean"] for row in rows} == {
        outcome["run"]: outcome["validation"]["tau_mean"] for outcome in outcomes
    }
    assert sweep_runs(uri, "language-models", "rho")[1].keys() == {trial.name for trial in (first, second, third)}


@pytest.mark.long
def test_a_band_search_is_watched_reported_and_found_again(
    cluster: dict[str, str], corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (line,) = lines_like("jobs.sweep gpt2* --sweep.search band")
    # Relative paths refer to the directory in which the job is started, whatever directory its trials run in.
    words = [
        *shlex.split(line)[3:], *tiny_words(os.path.relpath(corpus), tmp_path, 40, 4)[1:], *BAND,
        # In so few steps the mean temperature stays near its initial value. The last learning rate is far too high.
        "--sweep.axes", "temperature.rho=0.5,2.5", f"{RATE}=1e-3,3e-3,0.5",
    ]  # fmt: skip
    results = run_sweep(resolve(words))
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
    wait_for_free_cpus()
    # The data are prepared once, beside the sweep.
    assert len(list((tmp_path / "prepared").iterdir())) == 2
    assert not list((tmp_path / "rho").glob("*/prepared"))
    assert [step for step, _, _ in in_band.history] == [*range(4, 41, 4)]
    table = pd.read_parquet(tmp_path / "rho" / "trials.parquet")
    assert len(table) == len(results.rows)
    whole = table[table["step"] == 40].set_index("config/temperature.rho")
    assert whole.loc[finer.point["temperature.rho"], "tau_mean"] == finer.tau_mean
    assert re.search(r"Chosen: <b>rho\S+-learning_rate_base0\.003</b>", (tmp_path / "rho" / "report.html").read_text())

    parent, children = sweep_runs(results.tracking_uri, "language-models", "rho")
    assert children.keys() == {row.name for row in results.rows}
    assert children[worse.name].data.tags["stopped"] == worse.stopped
    best = min((row for row in results.rows if row.is_in_band), key=lambda row: row.loss)
    assert parent.data.tags["best_run"] == best.name
    # When the sweep is started again, nothing is trained.
    again = run_sweep(resolve(words))
    assert sorted(again.rows, key=str) == sorted(results.rows, key=str)
    assert len(runs_of(results.tracking_uri, "language-models")) == 1 + len(children)


@pytest.mark.long
def test_a_scheduler_of_tune_ends_the_worse_trials_and_the_best_is_exported(
    cluster: dict[str, str], corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        *tiny_words(corpus, tmp_path, 40, 4), *BAND, "--sweep.num-concurrent=1", "--sweep.scheduler=asha",
        "--sweep.axes", f"{RATE}=1e-3,3e-3,1e-5",
    ]  # fmt: skip
    results = run_sweep(resolve(words))
    assert "3 (grid, scheduler asha)" in capsys.readouterr().out
    assert not results.failed
    rows = {row.point[RATE]: row for row in results.rows}
    assert [(rows[rate].num_steps, rows[rate].stopped) for rate in (1e-3, 3e-3)] == [(40, ""), (40, "")]
    assert rows[3e-3].loss < rows[1e-3].loss < rows[1e-5].loss
    # It ends soon after the first validation after half of the steps, and keeps its checkpoint.
    assert 20 <= rows[1e-5].num_steps < 40
    assert rows[1e-5].stopped.startswith("ended early by ")
    directory = tmp_path / "rho" / rows[1e-5].name
    assert 20 <= last_checkpoint(directory) <= rows[1e-5].num_steps  # the newest may be whole and not noted yet
    assert len(sweep_runs(results.tracking_uri, "language-models", "rho")[1]) == 3
    wait_for_free_cpus()

    # The best trial is exported from its checkpoint if it is one that was ended early.
    for rate in (1e-3, 3e-3):
        shutil.rmtree(tmp_path / "rho" / rows[rate].name)
    _export_best(resolve(words), rows[1e-5])
    assert (tmp_path / "rho" / "export" / "config.json").is_file()


@pytest.mark.long
def test_a_population_goes_on_from_its_best_runs(cluster: dict[str, str], corpus: Path, tmp_path: Path) -> None:
    words = tiny_words(corpus, tmp_path, 24, 4)

    def run(*more: str) -> list[Row]:
        results = run_sweep(resolve([*words, *more]))
        assert not results.failed
        return list(results.rows)

    generations = ["--sweep.scheduler=pbt", "--sweep.num-generations=2", "--sweep.band", "0.01", "1.99"]
    rows = {row.name: row for row in run(*generations, "--sweep.axes", f"{RATE}=1e-5,3e-3")}
    slow, fast = rows["learning_rate_base1e-05"], rows["learning_rate_base0.003"]
    (moved,) = (row for row in rows.values() if "-from-" in row.name)
    assert moved.point[RATE] in (pytest.approx(2.4e-3), 3e-3)  # 3.6e-3 lies beyond the end of the axis
    assert slow.stopped
    assert (fast.num_steps, fast.stopped, moved.stopped) == (24, "", "")
    held = json.loads((tmp_path / "rho" / moved.name / "configuration.json").read_text())
    start = int(held["run.start_from"].removeprefix(f"{fast.name}@"))
    assert 12 <= start < 24
    assert moved.num_steps == 24 - start
    # Up to there it has the history of the run that it goes on from, and then its own.
    shared = [validation for validation in fast.history if validation[0] <= start]
    assert moved.history[: len(shared)] == shared
    assert moved.point[RATE] == 3e-3 or moved.history[-1] != fast.history[-1]

    # The run that was kept, and paused meanwhile, is the one that was never interrupted.
    (whole,) = run("--base.run.name=whole", "--sweep.axes", f"{RATE}=3e-3")
    assert [step for step, _, _ in fast.history] == [step for step, _, _ in whole.history]
    assert fast.history[-1][1:] == pytest.approx(whole.history[-1][1:], abs=1e-6)


def test_what_tune_writes_of_a_trial_holds_no_login(cluster: dict[str, str]) -> None:
    base: Any = with_fields(PRESETS["gpt2-rho-lr-small"]().base, {"tracking.uri": "http://me:hunter2@h"})
    assert b"hunter2" in cloudpickle.dumps(base)
    assert b"hunter2" not in cloudpickle.dumps(make_trainable(base))


@pytest.mark.long
def test_the_lines_of_python_on_the_page_run_with_a_search_and_a_scheduler_of_tune(
    cluster: dict[str, str], corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (lines,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "sweeps.md").read_text(), re.DOTALL)
    config = configure(PRESETS, [*tiny_words(corpus, tmp_path, 4, 2), "--base.tracking.no-enabled"])
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
