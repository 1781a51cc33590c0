"""Test that `jobs.submit` follows a job on a real cluster to its end, stops it, and submits a lost one again.

What `ray job submit` starts keeps the password of its MLflow server; test_train_lm.py trains by it.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from ray.job_submission import JobSubmissionClient
from server_support import Node, free_port, head_with_dashboard, ray_environment, wait_for_ports
from support import ROOT, wait_for

from jobs.engine.cluster import ensure_token
from jobs.engine.revision import checkout_revision

pytestmark = [pytest.mark.cluster, pytest.mark.long]

PROBE = '''"""Do what the arguments say, as a job on a cluster would."""

import os
import signal
import sys
import time
from pathlib import Path

from jobs.engine.command_line import run_job


def main(arguments):
    place, deed = Path(arguments[0]), arguments[1]
    number = len(list(place.glob("start-*")))
    print(f"start {number} of {deed}, revision {os.environ.get('TEMPNET_REVISION')}", flush=True)
    (place / f"start-{number}").touch()
    if deed == "fail":
        return 3
    if deed == "wait":
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            time.sleep(300)
        except KeyboardInterrupt:
            print("interrupted by the cluster", flush=True)
            raise
    if deed == "die" and number == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    if deed == "outlive" and number == 0:
        time.sleep(300)
    print("done", flush=True)
    return 0


if __name__ == "__main__":
    run_job(main)
'''


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Write the package `probe` into a new directory and return that."""
    (tmp_path / "code" / "probe").mkdir(parents=True)
    (tmp_path / "code" / "probe" / "__init__.py").touch()
    (tmp_path / "code" / "probe" / "job.py").write_text(PROBE)
    return tmp_path / "code"


def submit(head: dict[str, str], directory: Path, place: Path, deed: str, *options: str) -> subprocess.Popen[str]:
    """Start `jobs.submit ray` for the probe; its job works in `place`."""
    place.mkdir(exist_ok=True)
    environment = {name: value for name, value in head.items() if name not in ("RAY_ADDRESS", "DASHBOARD", "HEAD_PID")}
    return subprocess.Popen(
        [sys.executable, "-m", "jobs.submit", "ray", "--address", head["DASHBOARD"], "--working-dir", str(directory),
         *options, "--", "probe.job", str(place), deed],
        cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_status_log_and_end_of_jobs_on_a_cluster(ray_head: dict[str, str], directory: Path, tmp_path: Path) -> None:
    """The submissions run at the same time, because most of their time is spent on starting processes."""
    revision = checkout_revision() or "None"
    stopped = submit(ray_head, directory, tmp_path / "stopped", "wait", "--name", "stopped")
    failing = submit(ray_head, directory, tmp_path / "failing", "fail", "--name", "failing")
    dying = submit(ray_head, directory, tmp_path / "dying", "die", "--name", "dying")

    said, told = failing.communicate(timeout=400)
    assert failing.returncode == 3, told
    assert f"start 0 of fail, revision {revision}" in said
    assert "job failing is submitted" in told

    # The job killed itself, as the kernel would for lack of memory. It was submitted again and ended well.
    said, told = dying.communicate(timeout=400)
    assert dying.returncode == 0, told
    assert (said.count("start 0 of die"), said.count("start 1 of die"), said.count("done")) == (1, 1, 1)
    assert "the job's process was killed" in told
    assert "job dying-2 is submitted" in told

    wait_for(lambda: (tmp_path / "stopped" / "start-0").exists(), seconds=300)
    stopped.send_signal(signal.SIGTERM)
    said, told = stopped.communicate(timeout=400)
    assert stopped.returncode == 130, told
    assert "interrupted by the cluster" in said

    client = JobSubmissionClient(ray_head["DASHBOARD"])
    jobs = {job.submission_id: job for job in client.list_jobs()}
    assert {"stopped", "failing", "dying", "dying-2"} <= jobs.keys()
    assert jobs["failing"].metadata is not None
    assert jobs["failing"].metadata["revision"] == (checkout_revision() or "unknown")
    assert str(jobs["stopped"].status) == "STOPPED"


def test_a_job_whose_head_is_lost_is_submitted_again_when_there_is_a_head(directory: Path, tmp_path: Path) -> None:
    """The head and all that runs on it lose their power; some time later there is a head at the same address again."""
    environment, place, port = ray_environment(), tmp_path / "place", free_port()
    ensure_token()

    def start() -> Node:
        return Node(*head_with_dashboard(free_port(), port, free_port()), num_cpus=2, environment=environment)

    head = start()
    try:
        wait_for_ports(head.process, port)
        job = submit(environment | {"DASHBOARD": f"http://127.0.0.1:{port}"}, directory, place, "outlive")
        wait_for(lambda: (place / "start-0").exists(), seconds=300)
        head.kill()
        head = start()
        said, told = job.communicate(timeout=400)
    finally:
        head.kill()
    assert job.returncode == 0, told
    assert "the cluster does not answer; waiting for it" in told
    assert "the cluster does not know the job" in told
    # The head may be lost before it has sent what the first job printed.
    assert (said.count("start 1 of outlive"), said.count("done")) == (1, 1)
