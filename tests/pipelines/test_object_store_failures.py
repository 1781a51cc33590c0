"""Test that a store that fails loses nothing, and that one that refuses, or is not there, is explained."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from s3_support import ObjectStore

from pipelines.archives import list_archives
from pipelines.block_cache import BlockCache
from pipelines.object_store import BLOCK_BYTES, TRAFFIC, RemoteObject, open_for_reading
from pipelines.ranges import ByteRange, RangeReader
from pipelines.retries import RETRIES, count_all, count_by_reason
from pipelines.storage import create_directory, read_json, write_json
from pipelines.store_errors import RefusedWriteError
from tests.pipelines.stored_contents import CONTENTS, expected, path, random_ranges


@pytest.mark.parametrize("share", [0.01, 0.2])
def test_requests_that_fail_lose_nothing(store: ObjectStore, tmp_path: Path, share: float) -> None:
    store.behave(share_failing=share, seed=1)
    for seed in range(4):
        reader = RangeReader(store.filesystem, BlockCache(tmp_path / str(seed), 2**30))
        ranges = random_ranges(60, seed)
        assert reader.read(ranges) == expected(ranges)
    uncached = RangeReader(store.filesystem)
    ranges = random_ranges(60)
    assert uncached.read(ranges) == expected(ranges)
    assert store.counts().num_failed > 0


def test_retries_are_counted_and_end(store: ObjectStore) -> None:
    remote = RemoteObject(store.filesystem, path("small"))
    before = RETRIES.num_total, TRAFFIC.num_gets, TRAFFIC.num_bytes
    assert remote.read(0, 1000) == CONTENTS["small"]
    assert (RETRIES.num_total, TRAFFIC.num_gets, TRAFFIC.num_bytes) == (before[0], before[1] + 1, before[2] + 1000)
    RETRIES.take()
    store.behave(share_failing=1.0)
    with pytest.raises(OSError, match=r"^s3://bucket/data/small: the store failed, also when asked again"):
        remote.read(0, 1000)
    assert RETRIES.num_total - before[0] == 7
    counts = json.loads(RETRIES.take())
    assert counts.keys() == {f"s3://bucket at 127.0.0.1:{store.port}"}
    assert count_all(counts) == 7
    assert set(count_by_reason(counts)) <= {"slow_down", "service_unavailable", "network_connection"}
    assert RETRIES.take() == ""
    assert store.counts().num_failed >= 8


def test_an_object_that_is_gone_is_named_at_once(store: ObjectStore, tmp_path: Path) -> None:
    reader = RangeReader(store.filesystem, BlockCache(tmp_path, 2**30))
    assert reader.read([ByteRange(path("rest"), 0, 10)]) == [CONTENTS["rest"][:10]]
    store.behave(gone="rest")
    retries = RETRIES.num_total
    with pytest.raises(FileNotFoundError, match="s3://bucket/data/rest: there is no such object"):
        reader.read([ByteRange(path("rest"), 2 * BLOCK_BYTES, 10)])
    with pytest.raises(FileNotFoundError, match="s3://bucket/data/rest: there is no such object"):
        open_for_reading(store.filesystem, path("rest"))
    assert RETRIES.num_total == retries


@pytest.mark.parametrize("call", [list_archives, read_json])
def test_a_store_that_refuses_is_explained(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch, call: Callable[[str], object]
) -> None:
    store.behave(needs_keys=True)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(PermissionError, match=r"^s3://bucket/data: the store refuses access: set AWS_ACCESS_KEY_ID"):
        call("s3://bucket/data")


@pytest.mark.parametrize("call", [create_directory, lambda uri: write_json(uri, {})])
def test_a_store_that_refuses_to_be_written_is_explained(store: ObjectStore, call: Callable[[str], object]) -> None:
    store.behave(refuses_writes=True)
    wanted = "^s3://bucket/new: the store refuses to write there: check that AWS_ACCESS_KEY_ID .* permission to write"
    with pytest.raises(RefusedWriteError, match=wanted):
        call("s3://bucket/new")
    assert read_json("s3://bucket/new") is None
    store.behave()
    call("s3://bucket/new")


@pytest.mark.usefixtures("store")
def test_a_bucket_that_does_not_exist_and_a_store_that_does_not_answer_are_explained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for call in (list_archives, lambda uri: write_json(uri, {})):
        with pytest.raises(FileNotFoundError, match=r"^s3://bucket2/data: there is no such bucket"):
            call("s3://bucket2/data")
    with pytest.raises(FileNotFoundError, match="no such file or directory"):
        list_archives("s3://bucket/absent")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(ConnectionError, match=r"^s3://bucket/data: the store cannot be reached: set AWS_ENDPOINT_URL"):
        list_archives("s3://bucket/data")
