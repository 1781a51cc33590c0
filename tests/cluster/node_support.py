"""Run Ray nodes and training jobs as processes of their own, for tests and benchmarks that end them in unkind ways."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import ray
from server_support import free_port, wait_for_ports
from support import wait_for

from jobs.engine.cluster import ensure_token

BIN = Path(sys.executable).parent

RAY = [str(BIN / "ray")]
"""The command `ray`."""

RAY_OF_TESTS = [sys.executable, str(Path(__file__).with_name("ray_with_forks.py"))]
"""What starts the nodes of tests, whose workers are forks; benchmarks start theirs by `RAY`."""


class Node:
    """A Ray node on this machine with a session directory of its own.

    Args:
        options: options of `ray start` that say whether it is a head.
        num_cpus: number of its logical CPUs.
        environment: environment variables of its processes.
        program: what starts a node, `RAY` or `RAY_OF_TESTS`.
    """

    def __init__(
        self, *options: str, num_cpus: int, environment: Mapping[str, str], program: Sequence[str] = RAY
    ) -> None:
        command = [
            *program, "start", *options, "--block", f"--num-cpus={num_cpus}", "--disable-usage-stats",
            f"--temp-dir={tempfile.mkdtemp(prefix='ray-')}",
        ]  # fmt: skip
        self.process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def processes(self, pattern: str = "") -> list[psutil.Process]:
        """Return its processes whose command, or the name of whose program, begins with a text."""
        found = []
        with suppress(psutil.NoSuchProcess):
            family = psutil.Process(self.process.pid)
            for process in [*family.children(recursive=True), family]:
                with suppress(psutil.NoSuchProcess):
                    command = "".join(process.cmdline()[:1])
                    if command.startswith(pattern) or Path(command).name.startswith(pattern):
                        found.append(process)
        return found

    def kill(self, pattern: str = "") -> int:
        """Send SIGKILL to its processes of a name (`processes`), and return their number; "": to all.

        With all of them it is a machine that loses its power.
        """
        processes = self.processes(pattern)
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        if not pattern:
            self.process.wait()
        return len(processes)


def count_nodes() -> int:
    """Return the number of nodes of the cluster that are alive."""
    return sum(node["Alive"] for node in ray.nodes())


@contextmanager
def second_node(cluster: dict[str, str]) -> Iterator[Node]:
    """Start a second node with as many CPUs as the head has, which is gone after the block."""
    num_before = count_nodes()
    node = Node(f"--address={cluster['RAY_ADDRESS']}", num_cpus=4, environment=cluster, program=RAY_OF_TESTS)
    try:
        wait_for(lambda: count_nodes() > num_before, seconds=60)
        yield node
    finally:
        node.kill()
        wait_for(lambda: count_nodes() == 1, seconds=60)


class TwoNodes:
    """A cluster of a head and another node, each with room for one worker that reserves 1.5 CPUs, and its reader.

    Args:
        environment: environment variables beside those of this process.
        node_environment: environment variables that only the other node has.
        program: what starts a node, `RAY` or `RAY_OF_TESTS`.
    """

    def __init__(
        self, environment: Mapping[str, str], node_environment: Mapping[str, str], program: Sequence[str] = RAY
    ) -> None:
        self._program = program
        self._port = free_port()
        self.environment = {
            **os.environ,
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "RAY_AUTH_MODE": "token",
            "RAY_worker_niceness": "0",
            "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
            "RAY_num_workers_soft_limit": "4",
            **environment,
        }
        self._node_environment = node_environment
        ensure_token()
        self.start()

    def start(self) -> None:
        """Start both nodes."""
        self.environment.pop("RAY_ADDRESS", None)
        self.head = Node(
            "--head", f"--port={self._port}", "--include-dashboard=false", num_cpus=2, environment=self.environment,
            program=self._program,
        )  # fmt: skip
        wait_for_ports(self.head.process, self._port)
        self.environment["RAY_ADDRESS"] = f"127.0.0.1:{self._port}"
        time.sleep(5)
        self.start_node()

    def start_node(self) -> None:
        """Start the other node; it is there some seconds later."""
        address, environment = self.environment["RAY_ADDRESS"], self.environment | self._node_environment
        self.node = Node(f"--address={address}", num_cpus=2, environment=environment, program=self._program)

    def kill_workers(self) -> int:
        """Send SIGKILL to all training workers, and return their number."""
        return sum(place.kill("ray::RayTrainWorker") for place in (self.head, self.node))

    def close(self) -> None:
        """End both nodes."""
        self.node.kill()
        self.head.kill()


@contextmanager
def two_nodes(
    environment: Mapping[str, str], node_environment: Mapping[str, str], program: Sequence[str] = RAY
) -> Iterator[TwoNodes]:
    """Run a cluster of two nodes (`TwoNodes`)."""
    cluster = TwoNodes(environment, node_environment, program)
    try:
        yield cluster
    finally:
        cluster.close()


class Job:
    """A training job, and the lines that it has printed with their times.

    Args:
        options: preset and options of `jobs.train_lm`.
        environment: environment variables of its process.
    """

    def __init__(self, *options: str, environment: Mapping[str, str]) -> None:
        command = [sys.executable, "-m", "jobs.train_lm", *options]
        self.process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.lines: list[tuple[float, str]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append((time.monotonic(), line.rstrip()))

    def wait(self, pattern: str, after: float = 0.0, seconds: float = 600) -> float:
        """Return the time of the first line after a time that matches a regular expression at its start.

        Raises:
            TimeoutError: if there is none after some seconds, or the job has ended without it.
        """
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            has_ended = self.process.poll() is not None
            for at, line in list(self.lines):
                if at > after and re.match(pattern, line):
                    return at
            if has_ended:
                break
            time.sleep(0.05)
        raise TimeoutError(f"no line {pattern!r} in:\n{self.tail()}")

    def wait_for_new_workers(self, after: float) -> float:
        """Return when workers that were started after a time show their first step."""
        return self.wait(r"step +\d+/", self.wait("continuing after step", after))

    def wait_for_step(self, step: int, seconds: float = 600) -> bool:
        """Wait until a step is shown, and return True; False if the job ends before."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            has_ended = self.process.poll() is not None
            matches = (re.match(r"step +(\d+)/", line) for _, line in list(self.lines))
            if any(match and int(match[1]) >= step for match in matches):
                return True
            if has_ended:
                return False
            time.sleep(0.05)
        raise TimeoutError(f"step {step} was not reached in:\n{self.tail()}")

    def end(self, seconds: float = 600) -> int:
        """Wait for the end of the job and return its exit status."""
        status = self.process.wait(timeout=seconds)
        self._reader.join(timeout=10)
        return status

    def tail(self, number: int = 30) -> str:
        """Return the last lines."""
        return "\n".join(line for _, line in self.lines[-number:])
