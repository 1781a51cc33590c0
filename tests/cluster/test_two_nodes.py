"""Test a cluster of two nodes, two raylets on this machine: a job is submitted, and a node is taken away from it."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from killing import last_checkpoint
from mlflow import MlflowClient
from ray._raylet import GcsClient
from ray.core.generated import autoscaler_pb2
from server_support import free_port, wait_for_ports
from support import BIN, ROOT, wait_for
from test_train_lm import assert_same_losses, options_of

from jobs.engine.progress import PROGRESS_FILE
from jobs.engine.run_list import list_runs
from jobs.tasks.language_model.config import LanguageModelConfig
from pipelines.storage import read_json

pytestmark = [pytest.mark.cluster, pytest.mark.long]

SECONDS_TO_SAVE = 12


def start_node(environment: dict[str, str], *options: str) -> subprocess.Popen[bytes]:
    command = [str(BIN / "ray"), "start", "--block", "--disable-usage-stats", "--include-log-monitor=false", *options]
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[tuple[dict[str, str], subprocess.Popen[bytes]]]:
    """Start a head and a second node, which is yielded with the environment variables of a submission."""
    port, dashboard = free_port(), free_port()
    environment = os.environ | {
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "0.5",
        "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "1",
        "RAY_num_workers_soft_limit": "4",
        "REPORTER_UPDATE_INTERVAL_MS": "60000",
    }
    environment.pop("RAY_ADDRESS", None)
    head = start_node(
        environment, "--head", f"--port={port}", "--num-cpus=3", "--include-dashboard=true", "--dashboard-host=127.0.0.1",
        f"--dashboard-port={dashboard}", f"--dashboard-agent-listen-port={free_port()}", f"--temp-dir={tmp_path}/ray",
    )  # fmt: skip
    second = None
    try:
        wait_for_ports(head, port, dashboard, timeout=120)
        second = start_node(
            environment, f"--address=127.0.0.1:{port}", "--num-cpus=2", f"--dashboard-agent-listen-port={free_port()}"
        )
        client = GcsClient(address=f"127.0.0.1:{port}")
        wait_for(lambda: len(alive(client)) == 2, seconds=120)
        yield environment | {"GCS": f"127.0.0.1:{port}", "DASHBOARD": f"http://127.0.0.1:{dashboard}"}, second
    finally:
        for process in filter(None, (second, head)):
            process.terminate()
            process.wait(timeout=60)


def alive(client: GcsClient) -> list[Any]:
    return [info for info in client.get_all_node_info().values() if info.state == 0]


def has_worker(node: subprocess.Popen[bytes]) -> bool:
    """Return whether a worker of Ray Train runs under a node's process."""
    names = ["".join(child.cmdline()[:1]) for child in psutil.Process(node.pid).children(recursive=True)]
    return any(name.startswith("ray::RayTrainWorker") for name in names)


def test_a_submitted_run_saves_before_its_node_goes_and_ends_as_the_undisturbed_one(
    nodes: tuple[dict[str, str], subprocess.Popen[bytes]],
    tiny: Callable[..., LanguageModelConfig],
    reference: dict[str, Any],
    tmp_path: Path,
) -> None:
    environment, second = nodes
    sections: dict[str, dict[str, Any]] = {
        "run": {"checkpoint_every": 1000, "log_every": 1},
        "workers": {"placement": "spread"},
    }
    config = tiny("two-nodes", **sections)
    run = Path(config.run.directory)
    command = [
        sys.executable, "-m", "jobs.submit", "ray", "--address", environment["DASHBOARD"], "--", "train_lm",
        "gpt2-scratch", *options_of(config), f"--tracking.uri=sqlite:///{config.run.storage}/mlflow.db",
    ]  # fmt: skip
    with (tmp_path / "said").open("w") as said:
        submission = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=said, stderr=said)
    try:
        wait_for((run / PROGRESS_FILE).exists)
        assert has_worker(second), shlex.join(command)
        client = GcsClient(address=environment["GCS"])
        node_id = next(info.node_id.hex() for info in alive(client) if info.resources_total.get("CPU") == 2)
        is_accepted, message = client.drain_node(
            node_id,
            autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION"),
            "the provider takes it",
            int(1000 * (time.time() + SECONDS_TO_SAVE)),
        )
        assert is_accepted, message
        # No checkpoint was due; the announcement alone causes one.
        wait_for(lambda: last_checkpoint(run) > 0, seconds=SECONDS_TO_SAVE)
        saved = last_checkpoint(run)
        assert submission.wait(timeout=500) == 0, (tmp_path / "said").read_text()
    finally:
        submission.kill()
        submission.wait()
    outcome = read_json(f"{run}/outcome.json")
    assert outcome is not None
    assert 0 < saved <= outcome["num_steps"] == 40
    assert outcome["resumed_from_step"] in (0, saved)  # 0: it was at its end before the node went
    assert_same_losses(outcome, reference)
    (listed,) = (one for one in list_runs(config.run.storage) if one.name == "two-nodes")
    assert listed.state == "finished"
    tags = MlflowClient(outcome["tracking_uri"]).get_run(outcome["mlflow_run_id"]).data.tags
    assert tags["ray_job_id"] == "two-nodes"
    assert not ray.is_initialized()
