"""Provide an S3 server on loopback to tests: `moto`, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from pyarrow import fs
from support import free_port, wait_for_ports


@dataclass(frozen=True, kw_only=True)
class S3Server:
    """A server that runs, and what its clients need."""

    endpoint: str
    environment: dict[str, str]
    """Environment variables with which pyarrow finds the server."""
    log: Path
    """File with one line for every request."""

    @property
    def filesystem(self) -> fs.S3FileSystem:
        """The server's filesystem, whatever the environment is."""
        address = self.endpoint.removeprefix("http://")
        return fs.S3FileSystem(
            access_key="testing", secret_key="testing", region="us-east-1", scheme="http", endpoint_override=address,
            allow_bucket_creation=True,
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


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """Run an S3 server, and yield it; the environment of this process stays as it is."""
    log = tmp_path_factory.mktemp("s3") / "requests.log"
    port = free_port()
    # The library of AWS writes credentials into no file and asks no server for them, as they are in the environment.
    keys = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing", "AWS_DEFAULT_REGION": "us-east-1"}
    endpoint = f"http://127.0.0.1:{port}"
    with log.open("wb") as file:
        server = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "--host", "127.0.0.1", "--port", str(port)],
            env=os.environ | keys, stdout=file, stderr=file,
        )  # fmt: skip
        try:
            wait_for_ports(server, port, timeout=120)
            yield S3Server(endpoint=endpoint, environment=keys | {"AWS_ENDPOINT_URL": endpoint}, log=log)
        finally:
            server.terminate()
            server.wait(timeout=60)


@pytest.fixture
def bucket(s3_server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of an empty bucket that this process can use, with an empty cache of copies."""
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TEMPNET_MODELS", str(tmp_path / "cache"))
    return s3_server.create_bucket()
