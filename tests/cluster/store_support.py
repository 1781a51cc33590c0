"""Provide an S3 server on loopback to tests, and an empty bucket on it to each test that asks for one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from server_support import S3Server, run_s3_server


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """Run an S3 server, and yield it; the environment of this process stays as it is."""
    with run_s3_server(tmp_path_factory.mktemp("s3") / "requests.log") as server:
        yield server


@pytest.fixture
def bucket(s3_server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of an empty bucket that this process can use, with an empty cache of copies."""
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TEMPNET_MODELS", str(tmp_path / "cache"))
    return s3_server.create_bucket()
