"""Provide servers on loopback to tests and benchmarks: ports for any, and an S3 server, `moto`, in a process of its own.

This module imports nothing of the project, so that what imports it starts quickly and sets no other library up.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pyarrow import fs

# moto accepts any keys, and keeps the objects of all of them together.
_KEY, _REGION = "testing", "us-east-1"
# With these, the library of AWS looks for keys neither in files nor at a server of its own.
_KEYS = {"AWS_ACCESS_KEY_ID": _KEY, "AWS_SECRET_ACCESS_KEY": _KEY, "AWS_DEFAULT_REGION": _REGION}
_SECONDS_TO_START = 400  # MLflow took more than two minutes on a slow machine, beside other programs

WITHOUT_BACKGROUND_JOBS = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
"""Environment of an MLflow server that does not start its eight processes for jobs of its own."""


@dataclass(frozen=True, kw_only=True)
class S3Server:
    """A server that runs, and what its clients need."""

    port: int
    log: Path
    """File with one line for every request."""

    @property
    def endpoint(self) -> str:
        """URL of the server."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables with which pyarrow and other clients find the server."""
        return _KEYS | {"AWS_ENDPOINT_URL": self.endpoint}

    @property
    def filesystem(self) -> fs.S3FileSystem:
        """The server's filesystem, whatever the environment is."""
        return fs.S3FileSystem(
            access_key=_KEY, secret_key=_KEY, region=_REGION, scheme="http",
            endpoint_override=f"127.0.0.1:{self.port}", allow_bucket_creation=True,
        )  # fmt: skip

    def create_bucket(self) -> str:
        """Create a bucket and return its name."""
        name = f"bucket-{uuid.uuid4().hex[:12]}"
        self.filesystem.create_dir(name)
        return name

    def upload(self, directory: Path, to: str) -> None:
        """Copy the files of a local directory to `bucket/prefix`."""
        fs.copy_files(str(directory), to, destination_filesystem=self.filesystem)

    def download(self, path: str, to: Path) -> Path:
        """Copy what lies at `bucket/prefix` to a local directory, and return it."""
        to.mkdir(parents=True)
        fs.copy_files(path, str(to), source_filesystem=self.filesystem)
        return to

    def num_reads(self, path: str) -> int:
        """Return how often the content of `bucket/key` was asked for."""
        return self.log.read_text().count(f'"\x1b[36mGET /{path} HTTP') + self.log.read_text().count(
            f'"GET /{path} HTTP'
        )


@contextmanager
def run_s3_server(log: Path) -> Iterator[S3Server]:
    """Run an S3 server without buckets, and yield it; the environment of this process stays as it is."""
    port = free_port()
    with run_server(["-m", "moto.server", "--host", "127.0.0.1", "--port", str(port)], port, log):
        yield S3Server(port=port, log=log)


@contextmanager
def run_server(arguments: list[str], port: int, log: Path) -> Iterator[None]:
    """Run Python with arguments that start a server, from when it listens on a port of loopback until it is killed.

    What it prints is added to the log.
    """
    with log.open("ab") as file:
        process = subprocess.Popen([sys.executable, *arguments], env=os.environ | _KEYS, stdout=file, stderr=file)
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
