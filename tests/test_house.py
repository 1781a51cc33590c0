"""The direction of the house is enforced by lint: jobs/ may import everything, tempnet/ and pipelines/ not each other."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("file", "statement", "allowed"),
    [
        ("tempnet/x.py", "import pipelines.text", False),
        ("tempnet/x.py", "from jobs.engine import cluster", False),
        ("tempnet/models/x.py", "import ray", False),
        ("tempnet/models/x.py", "import mlflow", False),
        ("tempnet/x.py", "import torch", True),
        ("pipelines/x.py", "from tempnet.dro import robust_loss", False),
        ("pipelines/x.py", "from jobs.engine.cluster import start_ray", False),
        ("pipelines/x.py", "import deepspeed", False),
        ("pipelines/x.py", "import ray.data", True),
        ("jobs/x.py", "from jobs.engine.cluster import start_ray", True),
        ("jobs/engine/x.py", "from tempnet import TempNet", True),
        ("tests/tempnet/x.py", "from jobs.engine.cluster import start_ray", False),
    ],
)
def test_lint_holds_the_direction(file: str, statement: str, allowed: bool) -> None:
    command = [sys.executable, "-m", "ruff", "check", "--select", "TID251", "--stdin-filename", file, "-"]
    done = subprocess.run(command, cwd=ROOT, input=f"{statement}\n", capture_output=True, text=True)
    assert (done.returncode == 0) == allowed, done.stdout
