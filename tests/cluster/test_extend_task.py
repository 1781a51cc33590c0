"""Paste the task of docs/extend.md into a directory, and type the page's command there on a real Ray.

What its training computes is tested without Ray in tests/jobs/engine/test_loop.py.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from mlflow import MlflowClient
from readme_support import PAGES, PYTHON, shell_lines, write_task
from safetensors.numpy import load_file
from support import ROOT, history, outcome_of

pytestmark = [pytest.mark.cluster, pytest.mark.long]

MAKE_DATA, _, TRAIN_TOGETHER = shell_lines(PAGES["extend"])
NUM_STEPS = 60
OPTIONS = [
    f"--run.num-steps={NUM_STEPS}", "--run.checkpoint-every=30", "--run.max-restarts=0", "--workers.num-threads=1",
    "--validation.every=30", "--tracking.no-system-metrics",
]  # fmt: skip


def test_a_reader_of_the_page_gets_a_trained_model_and_its_run_in_mlflow(
    ray_head: dict[str, str], tmp_path: Path
) -> None:
    reader = write_task(tmp_path)
    for name in ("docs", "benchmarks"):
        (reader / name).symlink_to(ROOT / name)
    subprocess.run(["bash", "-c", MAKE_DATA], cwd=reader, check=True)
    words = [*shlex.split(TRAIN_TOGETHER.removeprefix(PYTHON)), *OPTIONS]
    # The workers of the shared Ray find the package, because the command is typed where it lies.
    done = subprocess.run([sys.executable, "-m", *words], cwd=reader, env=ray_head, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "held-out accuracy" in done.stdout
    (run,) = (path.name for path in (reader / "runs").iterdir() if (path / "outcome.json").exists())
    outcome = outcome_of(reader, run)
    assert (outcome["world_size"], outcome["num_lines"]) == (2, 64 * NUM_STEPS)
    losses = history(outcome, "train/loss")
    assert sorted(losses) == list(range(1, NUM_STEPS + 1))
    assert np.mean([losses[step] for step in range(NUM_STEPS - 9, NUM_STEPS + 1)]) < 0.75 * losses[1]

    tracked = MlflowClient(outcome["tracking_uri"]).get_run(outcome["mlflow_run_id"])
    assert (tracked.info.status, tracked.data.tags["preset"]) == ("FINISHED", "lines-small")
    assert int(tracked.data.params["num_train"]) > 1000
    assert tracked.data.params["model.hidden_size"] == "32"
    for key in ("train/lines_per_second", "train/learning_rate/base", "train/gradient_norm"):
        assert {10, 30, NUM_STEPS} <= set(history(outcome, key)), key
    assert sorted(history(outcome, "validation/accuracy")) == [30, NUM_STEPS]

    # The exported model has the accuracy on the held-out lines that the run reports.
    export = Path(outcome["export"])
    names = (export / "classes.txt").read_text().split("\n")
    rows = [row.split("\t") for row in (reader / "lines.tsv").read_text().split("\n")]
    held_out = [(row[0], row[1].strip()) for row in rows if len(row) == 2 and row[1].strip()][::10]
    weights = load_file(export / "model.safetensors")
    counts = np.array([[text.encode().count(value) for value in range(256)] for _, text in held_out])
    hidden = np.sqrt(counts / counts.sum(1, keepdims=True)) @ weights["0.weight"].T + weights["0.bias"]
    chosen = (np.maximum(hidden, 0) @ weights["2.weight"].T + weights["2.bias"]).argmax(1)
    right = [names[number] == label for number, (label, _) in zip(chosen, held_out, strict=True)]
    assert np.mean(right) == pytest.approx(outcome["validation"]["accuracy"], abs=1.5 / len(right))
    assert np.mean(right) > 0.8
