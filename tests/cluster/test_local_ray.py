"""Test the Ray that a job starts itself, in a separate process, because the other tests share a Ray."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from support import ROOT

pytestmark = pytest.mark.cluster

SCRIPT = """
import os
import ray
from jobs.engine.cluster import start_ray

start_ray()
print(os.nice(0), ray.get(ray.remote(num_cpus=0)(lambda: os.nice(0)).remote()))
print(ray._private.worker._global_node.get_session_dir_path())
"""


def test_it_is_private_and_its_workers_have_the_priority_of_the_job() -> None:
    environment = {
        name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", "RAY_worker_niceness")
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    job, worker, session = done.stdout.split()
    assert worker == job
    token = Path.home() / ".ray" / "auth_token"
    assert [stat.S_IMODE(path.stat().st_mode) for path in (Path(session), token)] == [0o700, 0o600]
