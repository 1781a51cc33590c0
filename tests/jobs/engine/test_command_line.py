"""Tests that a job ends with the status that it returns, and that on Ctrl-C it only prints that it was interrupted."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jobs.engine.command_line import run_job


def test_the_status_is_the_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["job", "--some", "words"])
    with pytest.raises(SystemExit) as ended:
        run_job(len)
    assert ended.value.code == 2


def test_ctrl_c_leaves_no_traceback(tmp_path: Path) -> None:
    words = ["-m", "jobs.sample_data", "--directory", str(tmp_path / "sample"), "--parts", "text"]
    process = subprocess.Popen(
        [sys.executable, *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        # A process that is started in the background ignores Ctrl-C, so the usual handler is set again.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    while not (tmp_path / "sample").exists():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert (process.returncode, said.strip()) == (130, "interrupted")
