"""Paste the task of docs/extend.md into a directory, and type the page's commands there on a real Ray."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from extend_support import LINES, write_files
from mlflow import MlflowClient
from safetensors.numpy import load_file
from support import ROOT

from jobs.engine.metrics import TrackedRun, metric_history

pytestmark = pytest.mark.cluster

DATA, ALONE, TOGETHER = LINES
"""The page's lines: one makes the data, one trains with one worker, and one with two."""
MODULE, NUM_STEPS = "line_classifier.train", 60
OPTIONS = [
    f"--run.num-steps={NUM_STEPS}", "--run.checkpoint-every=30", "--run.max-restarts=0", "--workers.num-threads=1",
    # With a smaller epsilon, Adam would make full-sized steps of gradients that are only rounding errors.
    "--optimizer.epsilon=1e-4", "--validation.every=30", "--tracking.no-system-metrics",
]  # fmt: skip


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a reader, with the page's files and its data."""
    directory = write_files(tmp_path_factory.mktemp("reader"))
    for name in ("docs", "benchmarks"):
        (directory / name).symlink_to(ROOT / name)
    subprocess.run(["bash", "-c", DATA], cwd=directory, check=True)
    return directory


@pytest.fixture(scope="module")
def environment(ray_head: dict[str, str]) -> dict[str, str]:
    """Return the environment variables of a reader whose commands use the shared Ray."""
    return {name: value for name, value in ray_head.items() if name not in ("TEMPNET_HOME", "MLFLOW_TRACKING_URI")}


def arguments_of(line: str) -> list[str]:
    """Return the arguments of a line of the page that trains, with the options of these tests."""
    python, flag, module, *arguments = shlex.split(line)
    assert (python, flag, module) == (".venv/bin/python", "-m", MODULE)
    return [*arguments, *OPTIONS]


def train(reader: Path, environment: dict[str, str], *arguments: str) -> str:
    """Run the page's command, assert that it succeeds, and return what it prints."""
    done = subprocess.run(
        [sys.executable, "-m", MODULE, *arguments], cwd=reader, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def outcome_of(reader: Path, name: str) -> dict[str, Any]:
    outcome: dict[str, Any] = json.loads((reader / "runs" / name / "outcome.json").read_text())
    return outcome


def history(outcome: dict[str, Any], key: str) -> dict[int, float]:
    return metric_history(TrackedRun(uri=outcome["tracking_uri"], run_id=outcome["mlflow_run_id"]), key)


@pytest.fixture(scope="module")
def undisturbed(reader: Path, environment: dict[str, str]) -> dict[str, Any]:
    """Train with one worker, and return the outcome, with the printed text as `said`."""
    said = train(reader, environment, *arguments_of(ALONE))
    return outcome_of(reader, "lines-small") | {"said": said}


def held_out_lines(reader: Path) -> list[list[str]]:
    """Return label and text of every tenth line that has both."""
    rows = [line.split("\t") for line in (reader / "lines.tsv").read_text().split("\n")]
    return [[row[0], row[1].strip()] for row in rows if len(row) == 2 and row[1].strip()][::10]


def test_a_reader_of_the_page_gets_a_trained_model_and_its_run_in_mlflow(
    reader: Path, undisturbed: dict[str, Any]
) -> None:
    assert "held-out accuracy" in undisturbed["said"]
    assert undisturbed["world_size"] == 1
    assert undisturbed["num_lines"] == 64 * NUM_STEPS
    losses = history(undisturbed, "train/loss")
    assert sorted(losses) == list(range(1, NUM_STEPS + 1))
    assert np.mean([losses[step] for step in range(NUM_STEPS - 9, NUM_STEPS + 1)]) < 0.75 * losses[1]

    run = MlflowClient(undisturbed["tracking_uri"]).get_run(undisturbed["mlflow_run_id"])
    assert run.info.status == "FINISHED"
    assert run.data.tags["preset"] == "lines-small"
    assert int(run.data.params["num_train"]) > 1000
    assert run.data.params["model.hidden_size"] == "32"
    for key in ("train/lines_per_second", "train/learning_rate/base", "train/gradient_norm"):
        assert {10, 30, NUM_STEPS} <= set(history(undisturbed, key)), key
    assert sorted(history(undisturbed, "validation/accuracy")) == [30, NUM_STEPS]
    assert run.data.metrics["validation/accuracy"] == undisturbed["validation"]["accuracy"]

    # The exported model has the accuracy on the held-out lines that the run reports.
    export = Path(undisturbed["export"])
    names = (export / "classes.txt").read_text().split("\n")
    assert names == undisturbed["class_names"] == ["code", "prose"]
    weights = load_file(export / "model.safetensors")
    held_out = held_out_lines(reader)
    counts = np.array([[text.encode().count(value) for value in range(256)] for _, text in held_out])
    hidden = np.sqrt(counts / counts.sum(1, keepdims=True)) @ weights["0.weight"].T + weights["0.bias"]
    chosen = (np.maximum(hidden, 0) @ weights["2.weight"].T + weights["2.bias"]).argmax(1)
    right = [names[number] == label for number, (label, _) in zip(chosen, held_out, strict=True)]
    assert np.mean(right) == pytest.approx(undisturbed["validation"]["accuracy"], abs=1.5 / len(right))
    assert np.mean(right) > 0.8
