"""Test that `jobs.submit` follows a job on a real cluster to its end, stops it, and submits a lost one again."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from node_support import BIN, Node
from ray.job_submission import JobSubmissionClient
from readme_support import lines_like
from server_support import free_port, wait_for_ports
from submit_support import submit, write_probe
from support import LANGUAGE_MODEL_OPTIONS, ROOT, wait_for

from jobs.engine.cluster import ensure_token
from jobs.engine.revision import checkout_revision

pytestmark = pytest.mark.cluster


def submit_line_of_the_readme(head: dict[str, str], corpus: Path, runs: Path) -> subprocess.Popen[str]:
    """Start the README's submission of a training with the tests' data; the job only describes what it would do."""
    (line,) = lines_like("jobs.submit ray *")
    places = {
        "http://head:8265": head["DASHBOARD"],
        "s3://bucket/openwebtext2/train": str(corpus / "train"),
        "s3://bucket/openwebtext2/validation": str(corpus / "validation"),
        "s3://bucket/runs": str(runs),
        "http://mlflow:5000": f"sqlite:///{runs}/mlflow.db",
    }
    words = [places.get(word, word) for word in shlex.split(line.removeprefix(".venv/bin/python"))]
    environment = {name: value for name, value in head.items() if name != "RAY_ADDRESS"}
    return subprocess.Popen(
        [sys.executable, *words, *LANGUAGE_MODEL_OPTIONS, f"--data.tokenizer={corpus}/tokenizer", "--workers.no-use-gpu",
         "--dry-run"],
        cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.mark.long
def test_status_log_and_end_of_jobs_on_a_cluster(
    ray_head: dict[str, str], corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The submissions run at the same time, because most of their time is spent on starting processes."""
    directory = write_probe(tmp_path / "code")
    revision = checkout_revision() or "None"
    stopped = submit(ray_head, directory, tmp_path / "stopped", "wait", "--name", "stopped")
    shown = submit_line_of_the_readme(ray_head, corpus, tmp_path / "runs")
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
    assert (tmp_path / "stopped" / "interrupted").exists()

    said, told = shown.communicate(timeout=400)
    assert shown.returncode == 0, said + told
    assert "job gpt2-scratch is submitted" in told
    assert str(tmp_path / "runs") in said

    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", ray_head["DASHBOARD"])
    client = JobSubmissionClient(ray_head["DASHBOARD"])
    jobs = {job.submission_id: job for job in client.list_jobs()}
    assert {"stopped", "failing", "dying", "dying-2"} <= jobs.keys()
    assert jobs["failing"].metadata is not None
    assert jobs["failing"].metadata["revision"] == (checkout_revision() or "unknown")
    assert str(jobs["stopped"].status) == "STOPPED"
    assert os.environ["RAY_AUTH_MODE"] == "token"


@pytest.mark.long
def test_a_job_whose_head_is_lost_is_submitted_again_when_there_is_a_head(tmp_path: Path) -> None:
    """The head and all that runs on it lose their power; some time later there is a head at the same address again."""
    directory, place, port = write_probe(tmp_path / "code"), tmp_path / "place", free_port()
    environment = os.environ | {
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "RAY_AUTH_MODE": "token",
        "PYTHONPATH": str(ROOT),
    }
    ensure_token()

    def start() -> Node:
        return Node(
            "--head", f"--port={free_port()}", "--include-dashboard=true", f"--dashboard-port={port}",
            f"--dashboard-agent-listen-port={free_port()}", num_cpus=2, environment=environment,
        )  # fmt: skip

    head = start()
    try:
        wait_for_ports(head.process, port)
        reached = environment | {"DASHBOARD": f"http://127.0.0.1:{port}"}
        job = submit(reached, directory, place, "outlive")
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
