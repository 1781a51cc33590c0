"""Fixtures of the tests of object stores."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from s3_support import ObjectStore, run_object_store

from pipelines import object_store
from tests.pipelines.stored_contents import CONTENTS


@pytest.fixture(scope="module")
def object_store_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    """Run a server that holds CONTENTS in `bucket/data`, and yield it."""
    directory = tmp_path_factory.mktemp("store")
    (directory / "data").mkdir()
    for name, content in CONTENTS.items():
        (directory / "data" / name).write_bytes(content)
    with run_object_store(directory / "log") as server:
        server.upload(directory / "data", "bucket/data")
        yield server


@pytest.fixture
def store(object_store_server: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    """Return the server, which does not fail until it is told to; this process can use it, and pauses are short."""
    object_store_server.behave()
    monkeypatch.setattr(object_store, "_FIRST_PAUSE", 0.001)
    monkeypatch.setattr(object_store, "_LONGEST_PAUSE", 0.01)
    for name, value in object_store_server.environment.items():
        monkeypatch.setenv(name, value)
    return object_store_server
