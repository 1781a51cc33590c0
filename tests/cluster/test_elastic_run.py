"""Test that a run whose number of workers may change shrinks and grows with the cluster, and trains as if it had not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
import ray
from killing import at_the_same_time, last_checkpoint
from language_model_support import assert_same_losses
from support import BIN, wait_for

from jobs.engine.launch import train
from jobs.tasks.language_model.config import LanguageModelConfig
from jobs.tasks.language_model.plan import make_plan

pytestmark = pytest.mark.cluster

Make = Callable[..., LanguageModelConfig]


class Node:
    """A second node on this machine, with 4 CPUs and a session directory of its own."""

    def __init__(self, cluster: dict[str, str]) -> None:
        num_before = self.count()
        command = [
            str(BIN / "ray"), "start", f"--address={cluster['RAY_ADDRESS']}", "--block", "--num-cpus=4",
            "--disable-usage-stats", f"--temp-dir={tempfile.mkdtemp(prefix='ray-')}",
        ]  # fmt: skip
        self.process = subprocess.Popen(command, env=cluster, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_for(lambda: self.count() > num_before, seconds=60)

    @staticmethod
    def count() -> int:
        """Return the number of nodes of the cluster that are alive."""
        return sum(node["Alive"] for node in ray.nodes())

    def kill(self) -> None:
        """End the node as a machine that loses its power: all of its processes by SIGKILL."""
        processes = [*psutil.Process(self.process.pid).children(recursive=True), psutil.Process(self.process.pid)]
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                os.kill(process.pid, signal.SIGKILL)
        self.process.wait()


@contextmanager
def second_node(cluster: dict[str, str]) -> Iterator[Node]:
    """Start a second node, which is gone after the block."""
    node = Node(cluster)
    try:
        yield node
    finally:
        if node.process.poll() is None:
            node.kill()
        wait_for(lambda: Node.count() == 1, seconds=60)


def num_writers(run: Path) -> int:
    """Return how many workers wrote the last checkpoint of a run; 0 if there is none, or it is being replaced."""
    with suppress(FileNotFoundError):
        state = json.loads((run / f"checkpoint-{last_checkpoint(run):08d}" / "state.json").read_text())
        return int(state["world_size"])
    return 0


def test_a_run_shrinks_with_the_cluster_and_grows_with_it(
    cluster: dict[str, str], tiny: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    """One worker and its reader fill a node. A node is lost in mid-run, and another one comes later."""
    steps = {"num_steps": 400, "log_every": 20}
    undisturbed = train(make_plan(tiny("undisturbed", run=steps, workers={"num_workers": 1})))
    config = tiny("elastic", run=steps, workers={"num_workers": "1:2", "cpus_per_worker": 3.5})
    run = Path(config.run.directory)
    capsys.readouterr()

    def disturb() -> None:
        wait_for(lambda: num_writers(run) == 2)
        lost.kill()
        wait_for(lambda: num_writers(run) == 1)
        with second_node(cluster):
            wait_for((run / "outcome.json").exists)

    with second_node(cluster) as lost, at_the_same_time(disturb):
        outcome = train(make_plan(config))
    said = capsys.readouterr().out
    assert "the cluster has room for 1 of 2 workers: the run goes on with 1" in said
    assert "the cluster has room for 2 workers: the run grows from 1, from step " in said
    assert outcome["world_size"] == 2
    assert_same_losses(outcome, undisturbed, tolerance=1e-5)
