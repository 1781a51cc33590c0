"""Start servers on loopback, nodes of Ray and other processes, for tests and benchmarks.

This module imports nothing of the project, so that what imports it starts quickly and sets no other library up.
"""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

BIN = Path(sys.executable).parent
_HERE = Path(__file__).parent
_SECONDS_TO_START = 400  # MLflow took more than two minutes on a slow machine, beside other programs


@contextmanager
def run_server(arguments: list[str], port: int, log: Path, environment: dict[str, str]) -> Iterator[None]:
    """Run Python with arguments that start a server, from when it listens on a port of loopback until it is killed.

    `environment` is added to its variables, and what it prints to the log.
    """
    with log.open("ab") as file:
        process = subprocess.Popen([sys.executable, *arguments], env=os.environ | environment, stdout=file, stderr=file)
    try:
        wait_for_ports(process, port)
        yield
    finally:
        process.kill()
        process.wait()


def run_together(code: str, arguments: list[list[str]], environment: dict[str, str]) -> list[str]:
    """Run a program that says "ready" several times at once, and return what each run prints after it may go on."""
    pipe = subprocess.PIPE
    processes = [
        subprocess.Popen([sys.executable, "-c", code, *words], env=environment, stdin=pipe, stdout=pipe, text=True)
        for words in arguments
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    return [process.communicate()[0] for process in processes]


def free_port() -> int:
    """Return the number of a port that nobody listens on.

    It lies below those that the kernel gives to outgoing connections, one of which could take it before its server does.
    """
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as listener, suppress(OSError):
            listener.bind(("", port))
            return port


def wait_for_ports(process: subprocess.Popen[bytes], *ports: int) -> None:
    """Wait until the process listens on all ports; fail if it ends or after `_SECONDS_TO_START`."""
    deadline = time.monotonic() + _SECONDS_TO_START
    for port in ports:
        while True:
            assert process.poll() is None, f"it ended with {process.returncode}"
            assert time.monotonic() < deadline, f"nothing listens on port {port} after {_SECONDS_TO_START} s"
            with socket.socket() as client:
                if client.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.2)


def ray_environment() -> dict[str, str]:
    """Return the environment variables of the nodes of a Ray with token authentication."""
    return os.environ | {
        # Tools such as pyenv put their own interpreters first, but the workers must use this environment's.
        "PATH": f"{BIN}:{os.environ['PATH']}",
        # Jobs run in other directories, but must import the code of this one.
        "PYTHONPATH": os.pathsep.join((str(_HERE.parents[1]), str(_HERE))),
        "RAY_AUTH_MODE": "token",
        # No cloud takes a node away, so no run needs the process that watches for that.
        "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
        # `jobs.engine.cluster` explains the next three variables.
        "RAY_agent_register_timeout_ms": "300000",
        "RAY_num_workers_soft_limit": "4",
        "RAY_DATA_USAGE_DISABLED": "1",
    }


class Node:
    """A Ray node on this machine with a session directory of its own, whose workers are forks (`fork_worker.py`).

    Ray notes in that directory which head was started last, and gives its address to submitted jobs, whatever their
    RAY_ADDRESS is. In one that several heads share it may be that of another one.

    Args:
        options: options of `ray start` that say whether it is a head.
        num_cpus: number of its logical CPUs.
        environment: environment variables of its processes.
        log: file of what it prints.
    """

    def __init__(
        self, *options: str, num_cpus: int, environment: Mapping[str, str], log: Path = Path(os.devnull)
    ) -> None:
        command = [
            sys.executable, str(_HERE / "ray_with_forks.py"), "start", *options, "--block", f"--num-cpus={num_cpus}",
            "--disable-usage-stats", f"--temp-dir={tempfile.mkdtemp(prefix='ray-')}",
        ]  # fmt: skip
        with log.open("wb") as file:
            self.process = subprocess.Popen(command, env=environment, stdout=file, stderr=file)

    def kill(self) -> None:
        """Kill all of its processes, as when a machine loses its power."""
        with suppress(psutil.NoSuchProcess):
            family = psutil.Process(self.process.pid)
            for process in [*family.children(recursive=True), family]:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        self.process.wait()


def head_with_dashboard(port: int, dashboard: int, agent: int) -> list[str]:
    """Return the options of a head at a port of loopback, to whose dashboard jobs can be submitted."""
    return [
        "--head", f"--port={port}", "--include-dashboard=true", "--dashboard-host=127.0.0.1",
        # If two Rays on a machine used the default port, no job could be submitted to the second one.
        f"--dashboard-port={dashboard}", f"--dashboard-agent-listen-port={agent}",
    ]  # fmt: skip
