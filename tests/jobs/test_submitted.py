"""Tests jobs inside the working directory that Ray unpacks for a submitted job and deletes afterwards."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PRESETS = {
    "train_lm": "gpt2-scratch-small",
    "train_clip": "clip-cc3m-tempnet-small",
    "train_sentences": "declutr-small-small",
    "train_classifier": "triple-entropy-small",
    "sweep": "gpt2-rho-lr-small",
    "prepare_features": "frozen-small",
    "reproduce": "T4",
}
"""Maps each job that has presets to one of them."""
OTHERS = ("analyse", "calibrate", "evaluate_clip", "evaluate_lm", "evaluate_sentences", "export", "generate", "playground",
          "predict_temperatures", "prepare_images", "prepare_text", "revision", "runs", "sample_data", "submit",
          "train_reward")  # fmt: skip
"""These jobs have no presets."""

# This script makes all calls of jobs, each with its environment, in one process: one process each would take a minute.
SCRIPT = """
import contextlib, importlib, io, json, os, sys

ended = []
for job, arguments, environment in json.loads(sys.stdin.read()):
    os.environ.pop("TEMPNET_HOME", None)
    os.environ.update(environment)
    said, printed = io.StringIO(), io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(printed):
        try:
            status = importlib.import_module(f"jobs.{job}").main(arguments)
        except SystemExit as exit:
            status = exit.code
    ended.append([status, printed.getvalue(), said.getvalue()])
print(json.dumps(ended))
"""


def call(directory: Path, *calls: tuple[str, list[str], dict[str, str]]) -> list[tuple[int, str, str]]:
    """Returns exit status, output and errors of calls (job, arguments, environment) in a working directory."""
    directory.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{SCRIPT}"],
        cwd=directory,
        input=json.dumps(calls),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return [(status, printed, said) for status, printed, said in json.loads(done.stdout.splitlines()[-1])]


@pytest.fixture
def uploaded(tmp_path: Path) -> Path:
    """Returns a directory like the one where Ray unpacks a submitted job, which jobs recognise by this part."""
    return tmp_path / "runtime_resources" / "working_dir_files" / "_ray_pkg_0"


def test_every_job_shows_its_help(uploaded: Path) -> None:
    asked: list[tuple[str, list[str], dict[str, str]]] = [(job, [name, "--help"], {}) for job, name in PRESETS.items()]
    asked += [(job, ["--help"], {}) for job in OTHERS]
    for (job, _, _), (status, printed, said) in zip(asked, call(uploaded, *asked), strict=True):
        assert (status, said) == (0, ""), job
        assert "usage: " in printed, job
    there = {path.stem for path in (ROOT / "jobs").glob("*.py") if "run_job(main)" in path.read_text()}
    assert there == {*PRESETS, *OTHERS}


SOURCES = {
    "train_lm": ["--data.train", "{data}", "--data.validation", "{data}"],
    "train_classifier": ["--data.directory", "{data}", "--data.tasks", "TREC", "--data.tokenizer", "{data}"],
    "sweep": ["--base.data.train", "{data}", "--base.data.validation", "{data}"],
}
"""Maps each job to arguments that name missing data."""


def test_the_storage_that_counts_is_the_one_that_was_given(uploaded: Path, tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    calls: list[tuple[str, list[str], dict[str, str]]] = []
    for job, data in SOURCES.items():
        field = "--base.run.storage" if job == "sweep" else "--run.storage"
        arguments = [PRESETS[job], *(argument.format(data=missing) for argument in data), "--dry-run"]
        calls += [
            (job, arguments, {}),
            (job, [*arguments, field, "here/runs"], {}),
            (job, [*arguments, field, str(tmp_path)], {}),
            (job, arguments, {"TEMPNET_HOME": str(tmp_path)}),
        ]
    ended = call(uploaded, *calls)
    for at, job in enumerate(SOURCES):
        for (status, _, said), storage in zip(ended[4 * at :][:2], ("runs", "here/runs"), strict=True):
            assert (status, said.count("\n")) == (2, 1), job
            assert said.startswith(f"error: run.storage = {storage!r} is relative to the uploaded working directory"), (
                job
            )
        # These storages are accepted, so the job refuses the missing data instead.
        for status, _, said in ended[4 * at + 2 :][:2]:
            assert status == 2, job
            assert "run.storage" not in said, job
            assert missing in said, job
