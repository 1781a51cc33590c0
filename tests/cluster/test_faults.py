"""What only a cluster can lose: a run on two nodes loses one of them, gets it back, and then loses the head.

That a killed worker, driver or disk costs the steps since the last checkpoint is shown in test_train_lm.py, and without Ray
in tests/jobs/engine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from server_support import Node, free_port, ray_environment, wait_for_ports
from support import ROOT, assert_same_losses, tiny_options, training_worker_pids, wait_for

from jobs.engine.cluster import ensure_token

pytestmark = [pytest.mark.cluster, pytest.mark.long]

OPTIONS = [
    "--run.num-steps=300", "--run.checkpoint-every=20", "--run.max-restarts=2", "--run.max-wait-minutes=2",
    "--workers.cpus-per-worker=1.5", "--workers.placement=spread", "--validation.every=300",
]  # fmt: skip
PORT = free_port()


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Node]]:
    """Yield a function that starts a node with room for one worker, the head or one that joins it at the same address."""
    ensure_token()
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    # Ray waits so long for a head that is lost.
    environment = ray_environment() | {"RAY_gcs_rpc_server_reconnect_timeout_s": "30"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    started: list[Node] = []

    def start(*options: str) -> Node:
        started.append(Node(*options, num_cpus=2, environment=environment))
        if "--head" in options:
            wait_for_ports(started[-1].process, PORT)
        return started[-1]

    yield start
    for node in started:
        node.kill()


def test_a_run_goes_on_without_a_lost_node_grows_with_another_and_survives_its_head(
    start: Callable[..., Node], corpus: Path, tmp_path: Path
) -> None:
    log, address = tmp_path / "log", f"127.0.0.1:{PORT}"
    as_head, as_other = ("--head", f"--port={PORT}", "--include-dashboard=false"), (f"--address={address}",)

    def train(name: str, *options: str, **variables: str) -> subprocess.Popen[bytes]:
        words = [*tiny_options(corpus, tmp_path / "runs", name), *OPTIONS, *options]
        with log.open("w") as file:
            command = [sys.executable, "-m", "jobs.train_lm", *words]
            return subprocess.Popen(command, cwd=ROOT, env=os.environ | variables, stdout=file, stderr=file)

    def says(text: str) -> None:
        wait_for(lambda: text in log.read_text() or run.poll() is not None)
        assert text in log.read_text(), log.read_text()

    alone = train("alone", "--workers.local", "--workers.num-workers=1", "--workers.zero-stage=0")
    assert alone.wait(timeout=300) == 0, log.read_text()
    head, node = start(*as_head), start(*as_other)
    run = train("elastic", "--workers.num-workers=1:2", RAY_ADDRESS=address)
    try:
        wait_for(lambda: bool(training_worker_pids(node.process.pid)) or run.poll() is not None)
        says("step  ")
        node.kill()
        says("the cluster has room for 1 of 2 workers: the run goes on with 1")
        other = start(*as_other)
        says("the cluster has room for 2 workers: the run grows from 1, from step ")
        for lost in (head, other):
            lost.kill()
        assert run.wait(timeout=300) == 1
        assert "does not answer: the cluster is lost" in log.read_text().splitlines()[-1]
        start(*as_head)
        start(*as_other)
        run = train("elastic", "--workers.num-workers=1:2", RAY_ADDRESS=address)
        assert run.wait(timeout=500) == 0, log.read_text()
    finally:
        run.kill()
    found, expected = (
        json.loads((tmp_path / "runs" / name / "outcome.json").read_text()) for name in ("elastic", "alone")
    )
    assert 0 < found["resumed_from_step"] < 300
    assert_same_losses(found, expected, tolerance=1e-5)
