"""Tests that a job ends with the status that it returns, and that on Ctrl-C it only prints that it was interrupted."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jobs.engine.command_line import parse_preset, run_job
from jobs.tasks.presets.language_models import PRESETS


def test_the_status_is_the_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["job", "--some", "words"])
    with pytest.raises(SystemExit) as ended:
        run_job(len)
    assert ended.value.code == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("train_lm gpt2-scratch-small --run.num-steps 0", "run.num_steps = 0 must be positive"),
        ("train_lm gpt2-scratch-small --optimizer.batch-size 7", "optimizer.batch_size = 7 is not divisible by"),
        ("train_clip clip-cc3m-tempnet-small --data.caption-noise 2", "data.caption_noise = 2 must lie in [0, 1]"),
        ("sweep gpt2-rho-lr-small --base.run.num-steps 0", "run.num_steps = 0 must be positive"),
        ("sweep gpt2-rho-lr-small --sweep.band 3 2", "sweep.band = (3.0, 2.0) must be two rising positive numbers"),
        ("reproduce T2 --seeds 0", "seeds = 0 must be at least 1"),
    ],
)
def test_a_refused_value_is_one_line_and_status_2(words: str, message: str) -> None:
    job, *rest = words.split()
    ended = subprocess.run(
        [sys.executable, "-m", f"jobs.{job}", *rest, "--dry-run"], capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith(f"error: {message}")
    assert ended.stderr.count("\n") == 1


def test_what_tyro_refuses_is_shown_with_the_help_of_the_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_preset(PRESETS, ["gpt2-scratch-small", "--run.num-steps", "many"], job="train_lm", purpose="")
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "Error parsing --run.num-steps" in said
    assert "Number of optimizer steps." in said


@pytest.mark.parametrize(("job", "module"), [("train_lm", "jobs.train_lm"), ("my_tasks.train", "my_tasks.train")])
def test_the_help_shows_the_module_of_the_command(job: str, module: str, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--help"], ["gpt2-scratch-small", "--help"]):
        with pytest.raises(SystemExit) as ended:
            parse_preset(PRESETS, words, job=job, purpose="")
        assert ended.value.code == 0
        assert f"usage: python -m {module} " in capsys.readouterr().out


def test_ctrl_c_leaves_no_traceback(tmp_path: Path) -> None:
    words = ["-m", "jobs.sample_data", "--directory", str(tmp_path / "sample"), "--parts", "text"]
    process = subprocess.Popen(
        [sys.executable, *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    while not (tmp_path / "sample").exists():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert (process.returncode, said.strip()) == (130, "interrupted")
