"""Start servers on loopback in processes of their own, for tests and benchmarks. This module imports nothing else."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_SECONDS_TO_START = 400  # MLflow took more than two minutes on a slow machine, beside other programs

WITHOUT_BACKGROUND_JOBS = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
"""Environment of an MLflow server that does not start its eight processes for jobs of its own."""


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


def free_port() -> int:
    """Return the number of a port of loopback that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
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
