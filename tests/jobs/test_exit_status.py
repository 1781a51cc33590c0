"""Tests the exit status of every job: 2 with a message if it refuses its input, 1 if it fails, and 130 on Ctrl-C."""

from __future__ import annotations

import importlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jobs.engine.command_line import fail

ROOT = Path(__file__).parents[2]

REFUSED = {
    "train_lm": ["gpt2-scratch-small", "--data.train", "nowhere"],
    "train_clip": ["clip-cc3m-clip-small", "--data.train", "nowhere"],
    "train_sentences": ["declutr-small-small", "--data.train", "nowhere"],
    "train_classifier": ["triple-entropy-small", "--data.directory", "nowhere"],
    "sweep": ["gpt2-rho-lr-small", "--base.data.train", "nowhere"],
    "reproduce": ["T16", "--change", "data.train=nowhere"],
    "evaluate_lm": ["--models", "nowhere", "--wikitext", "nowhere"],
    "evaluate_clip": ["--models", "nowhere", "--retrieval", "test=nowhere"],
    "evaluate_sentences": ["--models", "nowhere", "--data", "nowhere"],
    "predict_temperatures": ["--model", "nowhere", "--text", "nowhere"],
    "predict_temperatures --images": ["--images", "nowhere", "--model", "nowhere", "--output", "tables"],
    "generate": ["--model", "nowhere", "--prompts", "nowhere", "--output", "texts.jsonl"],
    "train_reward": ["--model", "nowhere", "--prompts", "nowhere", "--verifier.name", "exact"],
    "playground": ["--model", "nowhere"],
    "analyse subjectivity": ["subjectivity", "--model", "nowhere", "--data", "nowhere", "--output", "analysis"],
    "analyse instructions": ["instructions", "--model", "nowhere", "--data", "nowhere", "--output", "analysis"],
    "analyse openness": ["openness", "--runs", "nowhere", "--output", "analysis"],
    "analyse decoders": ["decoders", "--model", "nowhere", "--text", "nowhere", "--output", "analysis"],
    "calibrate headroom": ["headroom", "--model", "nowhere", "--text", "nowhere"],
    "calibrate headroom --images": ["headroom", "--model", "nowhere", "--images", "nowhere"],
    "calibrate rho": ["rho", "--model", "nowhere", "--text", "nowhere"],
    "calibrate tau-max": ["tau-max", "--model", "nowhere", "--prompts", "nowhere"],
    "export": ["runs/nowhere"],
    "prepare_features": ["frozen-small", "--model.path", "nowhere", "--data.train", "nowhere"],
    "prepare_text": ["--source", "nowhere", "--tokenizer", "nowhere", "--context-length", "64"],
    "prepare_images": ["--source", "nowhere"],
    "sample_data": ["--vocab-size", "1"],
    "revision": ["nowhere"],
    "runs": ["nowhere"],
    "submit": ["ray", "--address", "http://head:8265", "--working-dir", "nowhere", "--", "train_lm", "gpt2-scratch"],
}
"""Maps each job to arguments that name something missing or impossible."""


def test_every_job_is_tried() -> None:
    jobs = {path.stem for path in (ROOT / "jobs").glob("*.py") if "run_job(main)" in path.read_text()}
    assert {job.split()[0] for job in REFUSED} == jobs


@pytest.mark.parametrize("job", REFUSED)
def test_what_is_refused_ends_with_2_and_a_message(
    job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("TEMPNET_HOME", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"jobs.{job.split()[0]}").main(REFUSED[job])
    assert ended.value.code == 2
    message = capsys.readouterr().err
    assert re.search("^error: .*(nowhere|vocab_size = 1 is too small)", message), message
    assert "Traceback" not in message
    assert not list(tmp_path.iterdir())  # The refused job leaves no file behind.


def test_an_unknown_option_ends_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        importlib.import_module("jobs.prepare_images").main(["--sauce", "data"])
    assert ended.value.code == 2


def test_what_fails_ends_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        fail("the loss of step 3 is nan", 1)
    assert ended.value.code == 1
    assert capsys.readouterr().err == "error: the loss of step 3 is nan\n"


def test_ctrl_c_ends_with_130(tmp_path: Path) -> None:
    code = "import sys, time; from jobs.engine.command_line import run_job; sys.argv[1:] = []\n"
    code += "def main(arguments):\n    print('started', flush=True)\n    time.sleep(60)\n    return 0\nrun_job(main)"
    job = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert job.stdout is not None
    assert job.stdout.readline() == "started\n"
    time.sleep(0.1)
    job.send_signal(signal.SIGINT)
    _, said = job.communicate(timeout=60)
    assert job.returncode == 130
    assert said == "\ninterrupted\n"


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_nobody_reads_ends_with_141_and_no_traceback(unbuffered: str) -> None:
    code = "import sys; from jobs.engine.command_line import run_job; sys.argv[1:] = []\n"
    code += "def main(arguments):\n    print('line\\n' * 100_000)\n    return 0\nrun_job(main)"
    job = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert job.stdout is not None
    assert job.stderr is not None
    assert job.stdout.readline() == "line\n"
    job.stdout.close()
    assert job.wait(timeout=60) == 141
    assert job.stderr.read() == ""
