"""Test that commands answer `--help` and refuse arguments before they load what takes seconds."""

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
