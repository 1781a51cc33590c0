"""What a run loses at a checkpoint, when its workers are killed, when a node is lost, and until it uses one that comes.

    .venv/bin/python -m benchmarks.recovery

Two nodes on this machine, each with room for one worker of `gpt2-scratch-small`. The stall of a checkpoint is the time
between two steps with a checkpoint between them, less the median without one, by MLflow's timestamps. The other figures are
seconds from the event (SIGKILL of all workers; SIGKILL of all processes of a node; the command that starts a node) to the
first step that the new workers show.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
from mlflow import MlflowClient

from jobs.engine.ray_token import ensure_token

STALL_SHARE, RESTART_SECONDS, RESIZE_SECONDS = 0.02, 40.0, 60.0
_BIN = Path(sys.executable).parent
_STEADY_SECONDS = 15.0


class Node:
    """A Ray node on this machine with room for one worker and its reader."""

    def __init__(self, *options: str, environment: dict[str, str]) -> None:
        command = [
            str(_BIN / "ray"), "start", *options, "--block", "--num-cpus=2", "--disable-usage-stats",
            f"--temp-dir={tempfile.mkdtemp(prefix='ray-')}",
        ]  # fmt: skip
        self.process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def kill(self, pattern: str = "") -> None:
        """Send SIGKILL to the node's processes whose command begins with a text."""
        family = psutil.Process(self.process.pid)
        for process in [*family.children(recursive=True), family]:
            with suppress(psutil.NoSuchProcess):
                if "".join(process.cmdline()[:1]).startswith(pattern):
                    process.kill()


class Job:
    """A training job, and the lines that it has printed with their times."""

    def __init__(self, *options: str, environment: dict[str, str]) -> None:
        command = [sys.executable, "-m", "jobs.train_lm", "gpt2-scratch-small", "--run.log-every=1", *options]
        self.process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        self.lines: list[tuple[float, str]] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append((time.monotonic(), line.rstrip()))

    def wait(self, pattern: str, after: float, seconds: float = 300) -> float:
        """Return the time of the first line after a time that matches a regular expression at its start."""
        while time.monotonic() < after + seconds:
            for at, line in list(self.lines):
                if at > after and re.match(pattern, line):
                    return at
            if self.process.poll() is not None:
                break
            time.sleep(0.05)
        raise TimeoutError(f"no line {pattern!r} in:\n" + "\n".join(line for _, line in self.lines[-30:]))

    def wait_for_new_workers(self, after: float) -> float:
        """Return when workers that were started after a time show their first step."""
        return self.wait(r"step +\d+/", self.wait("continuing after step", after))


def measure_stall(options: list[str], storage: Path, environment: dict[str, str]) -> None:
    """Print how long the workers stand still at a checkpoint."""
    every, name = 20, "stall"
    job = Job(
        *options,
        f"--run.name={name}",
        "--run.num-steps=160",
        f"--run.checkpoint-every={every}",
        environment=environment,
    )
    if job.process.wait():
        raise RuntimeError("\n".join(line for _, line in job.lines[-30:]))
    client = MlflowClient(f"sqlite:///{storage}/mlflow.db")
    (run,) = client.search_runs([client.get_experiment("1").experiment_id], f"attributes.run_name = '{name}'")
    times = {
        metric.step: metric.timestamp / 1000 for metric in client.get_metric_history(run.info.run_id, "train/loss")
    }
    gaps = {step: times[step + 1] - times[step] for step in times if step + 1 in times and step > every}
    usual = statistics.median(gap for step, gap in gaps.items() if step % every)
    stalls = [gap - usual for step, gap in gaps.items() if step % every == 0]
    stall = statistics.mean(stalls)
    print(
        f"checkpoint: a step takes {usual:.3f} s; one with a checkpoint {stall:.3f} s more (mean of {len(stalls)}, "
        f"{min(stalls):.3f} to {max(stalls):.3f}): {stall / 60:.2%} of the time with one a minute "
        f"({STALL_SHARE:.0%} was to be)",
        flush=True,
    )


def measure_recovery(options: list[str], head: Node, node: Node, environment: dict[str, str]) -> Node:
    """Print the seconds after which a run goes on; return the node that is there at the end."""
    job = Job(
        *options, "--run.name=recovery", "--run.num-steps=1000000", "--run.checkpoint-every=10", "--run.max-restarts=9",
        environment=environment,
    )  # fmt: skip
    job.wait(r"step +30/", after=0.0)

    def report(event: str, seconds: float, target: float) -> None:
        print(f"{event}: {seconds:.1f} s to the next step ({target:g} was to be)", flush=True)
        time.sleep(_STEADY_SECONDS)

    started = time.monotonic()
    for place in (head, node):
        place.kill("ray::RayTrainWorker")
    report("workers killed", job.wait_for_new_workers(started) - started, RESTART_SECONDS)
    started = time.monotonic()
    node.kill()
    report("a node of two lost", job.wait_for_new_workers(started) - started, RESIZE_SECONDS)
    started = time.monotonic()
    node = Node(f"--address={environment['RAY_ADDRESS']}", environment=environment)
    grows = job.wait("the cluster has room for 2 workers: the run grows", started)
    print(f"a node came: {grows - started:.1f} s after its command the run begins to grow")
    report("a node came", job.wait_for_new_workers(grows) - started, RESIZE_SECONDS)
    job.process.send_signal(signal.SIGTERM)
    job.process.wait()
    return node


@contextmanager
def _two_nodes() -> Iterator[tuple[Node, Node, dict[str, str]]]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    environment = os.environ | {
        "PATH": f"{_BIN}:{os.environ['PATH']}",
        "RAY_AUTH_MODE": "token",
        "RAY_worker_niceness": "0",
        "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
        "RAY_num_workers_soft_limit": "4",
    }
    ensure_token()
    head = Node("--head", f"--port={port}", "--include-dashboard=false", environment=environment)
    environment |= {"RAY_ADDRESS": f"127.0.0.1:{port}"}
    time.sleep(10)
    node = Node(f"--address={environment['RAY_ADDRESS']}", environment=environment)
    time.sleep(5)
    try:
        yield head, node, environment
    finally:
        for place in (node, head):
            with suppress(psutil.NoSuchProcess):
                place.kill()


def main() -> None:
    """Measure, and print every figure beside its target."""
    with tempfile.TemporaryDirectory(prefix="recovery-") as name, _two_nodes() as (head, node, environment):
        options = [
            f"--run.storage={name}", "--workers.num-workers=1:2", "--workers.cpus-per-worker=1.5",
            "--workers.num-threads=1", "--workers.precision=fp32", "--validation.every=1000000",
        ]  # fmt: skip
        measure_stall(options, Path(name), environment)
        node = measure_recovery(options, head, node, environment)
        with suppress(psutil.NoSuchProcess):
            node.kill()


if __name__ == "__main__":
    main()
