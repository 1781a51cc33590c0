"""Test the Ray that a job starts itself, in a separate process, because the other tests share a Ray."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from support import ROOT

pytestmark = pytest.mark.cluster

SCRIPT = """
import os
import ray
from jobs.engine.cluster import start_ray

start_ray()
print(os.nice(0), ray.get(ray.remote(num_cpus=0)(lambda: os.nice(0)).remote()))
"""


def test_its_workers_have_the_priority_of_the_job() -> None:
    environment = {
        name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", "RAY_worker_niceness")
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    job, worker = done.stdout.split()
    assert worker == job
