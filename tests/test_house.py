"""Test the direction of imports: jobs/ imports everything; tempnet/ and pipelines/ import neither jobs/ nor each other.

Inside jobs/, commands import submission and studies, studies import scoring, scoring imports tasks, and tasks import the
engine; no import goes in the other direction."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
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


def shelf_of(path: Path) -> int:
    """Return the position in `SHELVES` of a file of jobs/; for a command, the number of shelves."""
    parts = path.relative_to(ROOT / "jobs").parts
    return SHELVES.index(parts[0]) if len(parts) > 1 else len(SHELVES)


def imported_files(path: Path) -> Iterator[Path]:
    """Yield the files of jobs/ that a file imports anywhere in its code."""
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            place = ROOT.joinpath(*name.split("."))
            if name.startswith("jobs."):
                yield next(file for file in (place.with_suffix(".py"), place / "__init__.py", place.parent.with_suffix(".py"),
                                             place.parent / "__init__.py") if file.exists())  # fmt: skip


def test_no_arrow_runs_back_between_the_shelves_of_jobs() -> None:
    back = [
        f"{path.relative_to(ROOT)} imports {target.relative_to(ROOT)}"
        for path in sorted((ROOT / "jobs").rglob("*.py"))
        for target in imported_files(path)
        if shelf_of(target) > shelf_of(path) or (shelf_of(target) == len(SHELVES) and target.name != "__init__.py")
    ]
    assert not back


def test_beside_the_shelves_jobs_holds_commands_only() -> None:
    for path in (ROOT / "jobs").glob("*.py"):
        assert path.name == "__init__.py" or "run_job(main)" in path.read_text(), path
    assert {path.relative_to(ROOT / "jobs").parts[0] for path in (ROOT / "jobs").glob("*/**/*.py")} == set(SHELVES)
