"""A run of tests that was ended goes on: what has passed is not run again, what failed or was cut off is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TESTS = """
import os
import signal
from pathlib import Path

import pytest

@pytest.fixture
def careless():
    yield
    assert Path("tidy").exists()

def note(name):
    with Path("ran").open("a") as file:
        file.write(name + " ")

@pytest.mark.parametrize("size", [1, 2])
def test_good(size):
    note(f"good{size}")

def test_bad():
    note("bad")
    assert Path("mended").exists()

def test_left_untidy(careless):
    note("untidy")

def test_elsewhere():
    note("elsewhere")
    pytest.skip("not here")

def test_killed():
    note("killed")
    if not Path("spared").exists():
        os.kill(os.getpid(), signal.SIGKILL)

def test_last():
    note("last")
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "pytest.ini").touch()
    return tmp_path


def run(project: Path) -> tuple[int, str, list[str]]:
    """Run the tests, and return pytest's status, what it printed, and the tests that ran."""
    (project / "ran").write_text("")
    command = [sys.executable, "-m", "pytest", "-p", "tests.resume", "--resume", "record/some"]
    done = subprocess.run(command, cwd=project, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    return done.returncode, done.stdout, (project / "ran").read_text().split()


def test_only_what_has_not_passed_runs_again(project: Path) -> None:
    status, _, ran = run(project)
    assert (status, ran) == (-9, ["good1", "good2", "bad", "untidy", "elsewhere", "killed"])
    (project / "spared").touch()
    status, shown, ran = run(project)
    assert (status, ran) == (1, ["bad", "untidy", "killed", "last"])
    assert "4 passed, 1 skipped, 2 failed; 2 have failed at least once" in shown
    (project / "mended").touch()
    (project / "tidy").touch()
    status, shown, ran = run(project)
    assert (status, ran) == (0, ["bad", "untidy"])
    assert "6 passed, 1 skipped, 0 failed; 2 have failed at least once" in shown
    assert run(project)[::2] == (0, [])


def test_half_a_line_is_no_outcome(project: Path) -> None:
    for name in ("spared", "mended", "tidy"):
        (project / name).touch()
    assert run(project)[0] == 0
    record = project / "record" / "some"
    record.write_text(record.read_text()[:-3])
    assert run(project)[::2] == (0, ["last"])
    assert run(project)[::2] == (0, [])
