"""Test that commands and workers start without loading what takes seconds and is not needed there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

LOADS_FIRST = {"prepare_images", "prepare_text", "sample_data"}
"""Commands without presets, which are loaded whole."""
HEAVY = {"deepspeed", "mlflow", "ray", "transformers"}


def test_commands_are_imported_without_the_packages_that_they_run() -> None:
    commands = {path.stem for path in (ROOT / "jobs").glob("*.py")} - LOADS_FIRST - {"__init__"}
    code = f"""
import importlib, sys
for name in {sorted(commands)}:
    importlib.import_module(f"jobs.{{name}}")
    print(name, *sorted({HEAVY} & set(sys.modules)))
"""
    shown = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert [line for line in shown.splitlines() if " " in line] == []


def test_workers_do_not_load_what_reports_need() -> None:
    tasks = sorted(path.parent.name for path in (ROOT / "jobs/tasks").glob("*/task.py"))
    assert len(tasks) >= 4
    code = f"""
import importlib, sys
import jobs.engine.loop
for task in {tasks}:
    importlib.import_module(f"jobs.tasks.{{task}}.create")
    importlib.import_module(f"jobs.tasks.{{task}}.task")
print("loaded", *sorted({{"matplotlib", "jobs.engine.launch"}} & set(sys.modules)))
"""
    shown = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert shown.splitlines()[-1] == "loaded"
