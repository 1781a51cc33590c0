"""What only a cluster can lose: a run on two nodes loses one of them, gets it back, and then loses the head.

That a killed worker, driver or disk costs the steps since the last checkpoint is shown in test_train_lm.py, and without Ray
in tests/jobs/engine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from server_support import BIN, RAY_OF_TESTS, Node, free_port, wait_for_ports
from support import ROOT, assert_same_losses, tiny_options, wait_for

from jobs.engine.cluster import ensure_token

pytestmark = [pytest.mark.cluster, pytest.mark.long]

OPTIONS = [
    "--run.num-steps=300", "--run.checkpoint-every=20", "--run.max-restarts=2", "--run.max-wait-minutes=2",
    "--workers.cpus-per-worker=1.5", "--workers.placement=spread", "--validation.every=300",
]  # fmt: skip


class Nodes:
    """A head and other nodes, each with room for one worker; together they are a cluster at one address."""

    def __init__(self) -> None:
        self.port, self.started = free_port(), list[Node]()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self, *options: str) -> Node:
        self.started.append(Node(*options, num_cpus=2, environment=os.environ, program=RAY_OF_TESTS))
        return self.started[-1]

    def start_head(self) -> Node:
        head = self.start("--head", f"--port={self.port}", "--include-dashboard=false")
        wait_for_ports(head.process, self.port)
        return head

    def start_other(self) -> Node:
        return self.start(f"--address={self.address}")

    def kill(self) -> None:
        """Let every node lose its power."""
        for node in self.started:
            if node.process.poll() is None:
                node.kill()


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    ensure_token()
    variables = {
        "PATH": f"{BIN}:{os.environ['PATH']}", "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests" / "cluster"))),
        "RAY_AUTH_MODE": "token", "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0", "RAY_num_workers_soft_limit": "4",
        # Ray waits so long for a head that is lost.
        "RAY_gcs_rpc_server_reconnect_timeout_s": "30",
    }  # fmt: skip
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    nodes = Nodes()
    yield nodes
    nodes.kill()


def test_a_run_goes_on_without_a_lost_node_grows_with_another_and_survives_its_head(
    nodes: Nodes, corpus: Path, tmp_path: Path
) -> None:
    log = tmp_path / "log"

    def train(name: str, *options: str, **variables: str) -> subprocess.Popen[bytes]:
        command = [
            sys.executable,
            "-m",
            "jobs.train_lm",
            *tiny_options(corpus, tmp_path / "runs", name),
            *OPTIONS,
            *options,
        ]
        with log.open("w") as file:
            return subprocess.Popen(command, cwd=ROOT, env=os.environ | variables, stdout=file, stderr=file)

    def says(text: str) -> None:
        wait_for(lambda: text in log.read_text() or run.poll() is not None)
        assert text in log.read_text(), log.read_text()

    alone = train("alone", "--workers.local", "--workers.num-workers=1", "--workers.zero-stage=0")
    assert alone.wait(timeout=300) == 0, log.read_text()
    nodes.start_head()
    node = nodes.start_other()
    elastic = {"RAY_ADDRESS": nodes.address}
    run = train("elastic", "--workers.num-workers=1:2", **elastic)
    try:
        wait_for(lambda: bool(node.processes("ray::RayTrainWorker")) or run.poll() is not None)
        says("step  ")
        node.kill()
        says("the cluster has room for 1 of 2 workers: the run goes on with 1")
        nodes.start_other()
        says("the cluster has room for 2 workers: the run grows from 1, from step ")
        nodes.kill()
        assert run.wait(timeout=300) == 1
        assert "does not answer: the cluster is lost" in log.read_text().splitlines()[-1]
        nodes.start_head()
        nodes.start_other()
        run = train("elastic", "--workers.num-workers=1:2", **elastic)
        assert run.wait(timeout=500) == 0, log.read_text()
    finally:
        run.kill()
    found, expected = (
        json.loads((tmp_path / "runs" / name / "outcome.json").read_text()) for name in ("elastic", "alone")
    )
    assert 0 < found["resumed_from_step"] < 300
    assert_same_losses(found, expected, tolerance=1e-5)
