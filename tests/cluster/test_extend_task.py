"""Paste the task of docs/extend.md into a directory, and type the page's command there on a real Ray.

What its training computes is tested without Ray in tests/jobs/engine/test_loop.py.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from readme_support import PAGES, PYTHON, shell_lines, write_task
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
    assert losses.keys() == set(range(1, NUM_STEPS + 1))
    assert losses[NUM_STEPS] < losses[1]
    assert sorted(history(outcome, "validation/accuracy")) == [30, NUM_STEPS]
    assert Path(outcome["export"], "model.safetensors").is_file()
