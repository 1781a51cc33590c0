"""Test the Ray that a job starts itself, in a separate process, because the other tests share a Ray."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from listening_support import is_loopback
from support import ROOT

pytestmark = pytest.mark.cluster

SCRIPT = """
import os
import sys

sys.path.insert(0, "tests/cluster")
import psutil
import ray
from jobs.engine.cluster import start_ray
from listening_support import family_of, listening

start_ray()
# With a runtime_env, for which Ray opens its directories to all users.
niceness = ray.remote(num_cpus=0, runtime_env={"env_vars": {"A": "1"}})(lambda: os.nice(0))
print(os.nice(0), ray.get(niceness.remote()))
print(ray._private.worker._global_node.get_session_dir_path())
print(sum(os.getpgid(child.pid) == os.getpgrp() for child in psutil.Process().children(recursive=True)))
for _, name, address in listening(family_of(os.getpid())):
    print(name, address)
"""


def run(script: str, **variables: str) -> list[list[str]]:
    """Run a script with a Ray of its own and return the words of each line that it prints."""
    unset = ("RAY_ADDRESS", "RAY_worker_niceness", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER")
    environment = {name: value for name, value in os.environ.items() if name not in unset} | variables
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return [line.split() for line in done.stdout.splitlines()]


def test_it_is_private_has_its_own_group_and_the_priority_of_the_job() -> None:
    (job, worker), (session,), (num_in_its_group,), *listeners = run(SCRIPT)
    assert worker == job
    private, token = Path(session).parents[1], Path.home() / ".ray" / "auth_token"
    assert [stat.S_IMODE(path.stat().st_mode) for path in (private, token)] == [0o700, 0o600]
    assert num_in_its_group == "0"  # so that a signal to the whole group leaves Ray alone while the job saves
    assert {"gcs_server", "raylet"} <= {name for name, _ in listeners}
    assert [address for _, address in listeners if not is_loopback(address)] == []


@pytest.mark.long
def test_it_listens_on_loopback_unless_it_is_told_otherwise() -> None:
    listeners = run(SCRIPT, RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="1")[3:]
    assert not all(is_loopback(address) for name, address in listeners if name in ("gcs_server", "raylet"))
