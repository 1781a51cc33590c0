"""Test the direction of imports: jobs/ imports everything; tempnet/ and pipelines/ import neither jobs/ nor each other.

Inside jobs/, commands import submission and studies, studies import scoring, scoring imports tasks, and tasks import the
engine; no import goes in the other direction."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SHELVES = ["engine", "tasks", "scoring", "studies", "submission"]
"""Folders of jobs/, lowest first: each may import itself and those before it. The commands, `jobs/*.py`, come last."""


@pytest.mark.parametrize(
    ("file", "allowed", "banned"),
    [
        ("tempnet/models/x.py", ["torch"], ["pipelines.plan", "jobs.engine.cluster", "ray", "mlflow"]),
        ("pipelines/x.py", ["ray.data"], ["tempnet.dro", "jobs.engine.cluster", "deepspeed"]),
        ("jobs/engine/x.py", ["tempnet", "pipelines.plan", "jobs.engine.cluster"], []),
        ("tests/tempnet/x.py", ["tempnet"], ["jobs.engine.cluster"]),
    ],
)
def test_lint_holds_the_direction(file: str, allowed: list[str], banned: list[str]) -> None:
    command = [sys.executable, "-m", "ruff", "check", "--select", "TID251", "--output-format", "concise"]
    text = "".join(f"import {name}\n" for name in [*allowed, *banned])
    done = subprocess.run(
        [*command, "--stdin-filename", file, "-"], cwd=ROOT, input=text, capture_output=True, text=True
    )
    found = [int(line.split(":")[1]) for line in done.stdout.splitlines() if "TID251" in line]
    assert found == list(range(len(allowed) + 1, len(allowed) + len(banned) + 1)), done.stdout


def shelf_of(name: str) -> int:
    """Return the position in `SHELVES` of a folder of jobs/; for a command, the number of shelves."""
    return SHELVES.index(name) if name in SHELVES else len(SHELVES)


def test_no_arrow_runs_back_between_the_shelves_of_jobs() -> None:
    """Nor does a command import another one."""
    back = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in sorted((ROOT / "jobs").rglob("*.py"))
        for line, name in re.findall(r"^( *(?:from|import) jobs(?:\.(\w+))?\b.*)$", path.read_text(), re.MULTILINE)
        if name not in SHELVES or shelf_of(name) > shelf_of(path.relative_to(ROOT / "jobs").parts[0])
    ]
    assert not back


def test_beside_the_shelves_jobs_holds_commands_only() -> None:
    for path in (ROOT / "jobs").glob("*.py"):
        assert path.name == "__init__.py" or "run_job(main)" in path.read_text(), path
    assert {path.relative_to(ROOT / "jobs").parts[0] for path in (ROOT / "jobs").glob("*/**/*.py")} == set(SHELVES)
