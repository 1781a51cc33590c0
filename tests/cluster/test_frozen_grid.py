"""Test what a frozen base makes possible on a real Ray: training from stored features, and a grid in one run."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from killing import last_checkpoint
from mlflow import MlflowClient
from readme_support import lines_like, run_line
from support import outcome_of, run_until

from jobs import train_lm
from jobs.engine.command_line import parse_preset
from jobs.engine.launch import train
from jobs.studies.sweeps.launch import make_sweep, run_sweep
from jobs.studies.sweeps.presets import PRESETS
from jobs.tasks.language_model.plan import make_plan
from tempnet.loading import load_causal_lm, load_tempnet

pytestmark = pytest.mark.cluster

OPTIONS = [
    "--run.num-steps=12", "--run.log-every=4", "--run.checkpoint-every=4", "--data.context-length=64",
    "--temperature.hidden-size=32", "--temperature.num-prototypes=16", "--optimizer.batch-size=8",
    "--optimizer.micro-batch-size=2", "--optimizer.learning-rate-tempnet=0.01", "--workers.num-threads=1",
    "--workers.precision=fp32", "--validation.every=6", "--validation.num-blocks=16",
    "--validation.num-oracle-tokens=256",
]  # fmt: skip
RHO = "--temperature.rho=1.5"
MAX_GRAD_NORM = 0.003


AXES = ["--sweep.axes", "temperature.rho=1,2", "optimizer.learning_rate_tempnet=1e-2,1e-3"]


def test_a_grid_trains_from_stored_features(home: Path, reference: dict[str, Any]) -> None:
    (prepare,), (sweep,) = lines_like("jobs.prepare_features *"), lines_like("jobs.sweep frozen-rho-lr-small *")
    run_line(prepare, *OPTIONS, RHO)
    run_line(sweep, *(option.replace("--", "--base.", 1) for option in OPTIONS), *AXES, "--base.run.num-steps=4")
    rows = json.loads((home / "runs" / "frozen-rho-lr-small" / "results.json").read_text())["rows"]
    assert [row["num_steps"] for row in rows] == [4] * 4
    assert len({row["tau_mean"] for row in rows}) == 4
    load_causal_lm(home / "runs" / "frozen-rho-lr-small" / rows[0]["name"] / "export")


@pytest.mark.long
def test_training_from_stored_features(
    home: Path, reference: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    (prepare,), (train_line,) = lines_like("jobs.prepare_features *"), lines_like("jobs.train_lm frozen-small *")
    # Another context length has features of its own.
    prepare, from_features = (
        f"{line} --data.context-length=32"
        for line in (prepare, f"{train_line} --model.features --run.name=from-features")
    )
    options = [option for option in OPTIONS if "context-length" not in option]
    with pytest.raises(SystemExit) as ended:
        train_lm.main([*shlex.split(from_features)[3:], *options, RHO])
    assert "store them by the same command with jobs.prepare_features" in capsys.readouterr().err
    assert ended.value.code == 2
    already = set((home / "runs" / "prepared").glob("features-*"))
    run_line(prepare, *options, RHO)
    assert " bytes (hidden size " in capsys.readouterr().out
    # Those of the training and of the validation text are new.
    directory, _ = sorted(set((home / "runs" / "prepared").glob("features-*")) - already)
    before = {file.name: file.stat().st_mtime_ns for file in directory.iterdir()}
    # A file that is missing is made again, and the others are kept.
    first = min(name for name in before if name.startswith("features-"))
    (directory / first).unlink()
    (directory / "manifest.json").unlink()
    run_line(prepare, *options, RHO)
    after = {file.name: file.stat().st_mtime_ns for file in directory.iterdir()}
    assert {name for name in before if after[name] != before[name]} == {first, "manifest.json"}
    run_line(from_features, *options, RHO)
    outcome = outcome_of(home, "from-features")
    run_line(from_features.replace("--model.features ", ""), *options, RHO, "--run.name=from-base")
    on_base = outcome_of(home, "from-base")
    for key in ("cross_entropy", "cross_entropy_tau", "tau_mean", "robust_loss"):
        assert outcome["validation"][key] == pytest.approx(on_base["validation"][key], rel=2e-3)
    load_causal_lm(outcome["export"])


@pytest.mark.long
def test_a_grid_side_by_side_is_killed_and_goes_on(
    home: Path, reference: dict[str, Any], cluster: dict[str, str]
) -> None:
    (line,) = lines_like("jobs.sweep frozen-rho-lr-small *")
    words = [
        *shlex.split(line.replace(" --base.model.features", ""))[3:],
        *(option.replace("--", "--base.", 1) for option in OPTIONS),
        "--base.optimizer.micro-batch-size=4",
        "--base.workers.num-workers=2",
        f"--base.optimizer.max-grad-norm={MAX_GRAD_NORM}",
        "--base.run.name=grid",
        *AXES,
    ]
    runs = home / "runs" / "grid"

    def has_checkpoint() -> bool:
        return any(last_checkpoint(run) >= 4 for run in runs.glob("side-by-side-*"))

    run_until(has_checkpoint, "jobs.sweep", words, cluster, directory=home)
    config, _ = parse_preset(PRESETS, words, job="sweep", purpose="")
    results = run_sweep(make_sweep(config))
    assert not results.failed
    assert len(results.rows) == 4
    outcomes = {row.name: json.loads((runs / row.name / "outcome.json").read_text()) for row in results.rows}
    assert {outcome["resumed_from_step"] for outcome in outcomes.values()} <= {4, 8, 12}
    assert not list(runs.glob("side-by-side-*/checkpoint-*"))
    client = MlflowClient(results.tracking_uri)
    experiment = client.get_experiment_by_name("language-models")
    assert experiment is not None
    found = client.search_runs([experiment.experiment_id])
    (parent,) = (run for run in found if run.info.run_name == "grid")
    children = [run for run in found if run.data.tags.get("mlflow.parentRunId") == parent.info.run_id]
    assert sorted(run.info.run_name for run in children) == sorted(outcomes)
    assert {run.info.status for run in [parent, *children]} == {"FINISHED"}
    for child in children:
        history = client.get_metric_history(child.info.run_id, "train/loss")
        assert {metric.step for metric in history} == set(range(1, 13))
        norms = client.get_metric_history(child.info.run_id, "train/gradient_norm")
        assert all(metric.value > MAX_GRAD_NORM for metric in norms)  # All steps are clipped.
    # Every trial is the run that it would be alone.
    for row in (results.rows[0], results.rows[-1]):
        trial = config.trial(row.point)
        alone = train(make_plan(replace(trial, run=replace(trial.run, name="alone-" + row.name))), with_progress=False)
        assert outcomes[row.name]["validation"] == pytest.approx(alone["validation"], rel=1e-4, abs=1e-6, nan_ok=True)
        own, other = (load_tempnet(outcome["export"]).state_dict() for outcome in (outcomes[row.name], alone))
        for name, value in other.items():
            torch.testing.assert_close(own[name], value, rtol=1e-4, atol=1e-5)
        assert (runs / row.name / "report" / "tokens.html").is_file()
    assert run_sweep(make_sweep(config)).rows == results.rows
