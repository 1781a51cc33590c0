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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

BIN = Path(sys.executable).parent

RAY = [str(BIN / "ray")]
"""The command `ray`."""

RAY_OF_TESTS = [sys.executable, str(Path(__file__).with_name("ray_with_forks.py"))]
"""What starts the nodes of tests, whose workers are forks; benchmarks start theirs by `RAY`."""

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
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, *words],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
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
