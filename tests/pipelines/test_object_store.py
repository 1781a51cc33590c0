"""Test that what is read from a real S3 server is what was stored there, in few requests and with a cache."""

from __future__ import annotations

import io
import os
import tarfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from process_support import run_together
from s3_support import ObjectStore

from pipelines.block_cache import BlockCache
from pipelines.images.archives import list_image_archives
from pipelines.images.units import divide_archive
from pipelines.object_store import BLOCK_BYTES, open_for_reading
from pipelines.ranges import ByteRange, RangeReader
from pipelines.tars import tar_members
from tests.pipelines.stored_contents import CONTENTS, SIZES, expected, path, random_ranges


@pytest.mark.parametrize("has_cache", [True, False])
def test_ranges_are_those_of_the_local_files(store: ObjectStore, tmp_path: Path, has_cache: bool) -> None:
    reader = RangeReader(store.filesystem, BlockCache(tmp_path, 2**30) if has_cache else None)

    @given(st.sampled_from(sorted(SIZES)), st.integers(-40, 40), st.integers(0, 4), st.integers(0, 3 * BLOCK_BYTES))
    @settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    def check(name: str, shift: int, block: int, size: int) -> None:
        part = ByteRange(path(name), max(0, block * BLOCK_BYTES + shift), size)
        assert reader.read([part]) == expected([part])

    check()


def test_every_byte_is_read_once_in_blocks_although_ranges_are_random(store: ObjectStore, tmp_path: Path) -> None:
    ranges = random_ranges(200)
    assert RangeReader(store.filesystem, BlockCache(tmp_path, 2**30)).read(ranges) == expected(ranges)
    counts = store.counts()
    assert counts.num_gets == 1 + 1 + 2 + 3
    assert counts.num_bytes == sum(SIZES.values())
    other = RangeReader(store.filesystem, BlockCache(tmp_path, 2**30))  # as another process of the node does
    assert list(other.stream(ranges)) == expected(ranges)
    assert store.counts().num_gets == counts.num_gets


@pytest.mark.parametrize("has_cache", [True, False])
def test_a_whole_file(store: ObjectStore, tmp_path: Path, has_cache: bool) -> None:
    reader = RangeReader(store.filesystem, BlockCache(tmp_path, 2**30) if has_cache else None)
    for name, content in CONTENTS.items():
        assert reader.read_file(path(name)).to_pybytes() == content
        assert reader.read_file(path(name)).to_pybytes() == content
    assert store.counts().num_bytes == sum(SIZES.values()) * (1 if has_cache else 2)


def test_what_is_fetched_ahead_is_not_fetched_again(store: ObjectStore, tmp_path: Path) -> None:
    reader = RangeReader(store.filesystem, BlockCache(tmp_path, 2**30))
    reader.read_ahead([path(name) for name in ("rest", "two")])
    deadline = time.monotonic() + 60
    while (num_gets := store.counts().num_gets) < 5 or list(tmp_path.glob("*.partial")):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert num_gets == 5
    part = ByteRange(path("rest"), 5, SIZES["rest"])
    assert reader.read([part]) == expected([part])
    assert store.counts().num_gets == 5


@pytest.mark.parametrize("name", sorted(SIZES))
def test_a_file_read_from_front_to_back_takes_one_request_a_block(store: ObjectStore, name: str) -> None:
    with open_for_reading(store.filesystem, path(name)) as file:
        assert file.size() == SIZES[name]
        assert b"".join(iter(lambda: file.read(2**20 + 1), b"")) == CONTENTS[name]
        assert file.read(1) == b""
    counts = store.counts()
    assert counts.num_bytes == SIZES[name]
    assert counts.num_gets == (max(1, SIZES[name] // BLOCK_BYTES) if SIZES[name] else 0)


def test_an_open_file_is_like_a_local_one(store: ObjectStore, tmp_path: Path) -> None:
    (tmp_path / "rest").write_bytes(CONTENTS["rest"])
    size = SIZES["rest"]
    steps = st.one_of(
        st.tuples(st.just("read"), st.integers(0, BLOCK_BYTES + 5)),
        st.tuples(st.just("seek"), st.integers(0, size + 5)),
        st.tuples(st.just("read_at"), st.integers(0, 1000), st.integers(0, size - 1)),
        st.tuples(st.just("tell")),
    )

    @given(st.lists(steps, max_size=12))
    @settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    def check(walk: list[Any]) -> None:
        with open_for_reading(store.filesystem, path("rest")) as remote, (tmp_path / "rest").open("rb") as reference:
            for name, *arguments in walk:
                if name == "read_at":
                    expected = os.pread(reference.fileno(), *arguments)
                else:
                    expected = getattr(reference, name)(*arguments)
                assert getattr(remote, name)(*arguments) == expected

    check()


def test_a_file_is_read_ahead_once_it_is_read_beyond_a_block(store: ObjectStore) -> None:
    with open_for_reading(store.filesystem, path("rest")) as file:
        assert file.read(BLOCK_BYTES) == CONTENTS["rest"][:BLOCK_BYTES]
        assert store.counts().num_gets == 1
        assert file.read(1) == CONTENTS["rest"][BLOCK_BYTES : BLOCK_BYTES + 1]
        deadline = time.monotonic() + 60
        while store.counts().num_gets < 3:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert file.read() == CONTENTS["rest"][BLOCK_BYTES + 1 :]
    assert store.counts().num_gets == 3


def test_a_part_of_a_file_is_read_without_what_follows_it(store: ObjectStore) -> None:
    stop = BLOCK_BYTES + 100
    with open_for_reading(store.filesystem, path("rest"), stop=stop) as file:
        file.seek(50)
        assert file.read(stop - 50) == CONTENTS["rest"][50:stop]
    assert store.counts().num_bytes == stop - 50
    assert store.counts().num_gets == 1


def test_members_of_a_tar_in_a_bucket(store: ObjectStore) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for number in range(40):
            info = tarfile.TarInfo(f"{number}.bin")
            info.size = 2**19
            tar.addfile(info, io.BytesIO(np.random.default_rng(number).bytes(2**19)))
    with store.filesystem.open_output_stream("bucket/other.tar") as stream:
        stream.write(buffer.getvalue())
    store.behave()
    with open_for_reading(store.filesystem, "bucket/other.tar") as file:
        for number, (info, member) in enumerate(tar_members(file)):
            assert info.name == f"{number}.bin"
            assert member.read(info.size) == np.random.default_rng(number).bytes(2**19)
    counts = store.counts()
    assert counts.num_bytes <= len(buffer.getvalue())
    assert counts.num_bytes / counts.num_gets >= BLOCK_BYTES


def test_a_tar_in_a_bucket_is_divided_as_a_local_one_in_large_requests(store: ObjectStore, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "small.tar", "w") as tar:
        for number in range(300):
            for suffix, size in (("jpg", 2**16 + number), ("txt", 40)):
                info = tarfile.TarInfo(f"{number}.{suffix}")
                info.size = size
                tar.addfile(info, io.BytesIO(bytes(size)))
    store.upload(tmp_path, "bucket/tars")
    store.behave()
    uri = "s3://bucket/tars/small.tar"
    (local,), (remote,) = list_image_archives(str(tmp_path / "small.tar")), list_image_archives(uri)
    parts = divide_archive(uri, remote, 2**20)
    assert parts == divide_archive(str(tmp_path / "small.tar"), local, 2**20)
    assert len(parts) > 15
    counts = store.counts()
    assert counts.num_bytes <= 1.05 * local.num_bytes
    assert counts.num_bytes / counts.num_gets >= BLOCK_BYTES


def test_a_full_disk_means_reading_without_the_cache(store: ObjectStore, tmp_path: Path) -> None:
    reader = RangeReader(store.filesystem, BlockCache(tmp_path, BLOCK_BYTES // 2))
    ranges = random_ranges(10)
    assert reader.read(ranges) == expected(ranges)
    assert reader.read_file(path("rest")).to_pybytes() == CONTENTS["rest"]


PROCESS = """
import sys
from pathlib import Path
import numpy as np
from pipelines.block_cache import BlockCache
from pipelines.ranges import ByteRange, RangeReader
from pipelines.storage import resolve
filesystem, path = resolve("s3://bucket/data/rest")
reader = RangeReader(filesystem, BlockCache(Path(sys.argv[1]), 2**30))
print("ready", flush=True)
sys.stdin.readline()
rng = np.random.default_rng(int(sys.argv[2]))
ranges = [ByteRange(path, int(at), 1000) for at in rng.integers(3 * 2**23, size=200)]
reader.read_ahead([path])
print(hash(b"".join(reader.read(ranges))), flush=True)
"""


def test_two_processes_fetch_a_block_once(store: ObjectStore, tmp_path: Path) -> None:
    store.behave(latency=0.3)
    environment = {**os.environ, **store.environment, "PYTHONHASHSEED": "0"}
    outputs = run_together(PROCESS, [[str(tmp_path), "5"]] * 2, environment)
    assert outputs[0] == outputs[1] != ""
    counts = store.counts()
    assert counts.num_gets == 3
    assert counts.num_bytes == SIZES["rest"]


@pytest.mark.parametrize("damage", ["changed", "cut", "empty"])
def test_a_damaged_block_is_fetched_again(store: ObjectStore, tmp_path: Path, damage: str) -> None:
    ranges = random_ranges(50)
    assert RangeReader(store.filesystem, BlockCache(tmp_path, 2**30)).read(ranges) == expected(ranges)
    blocks = [file for file in tmp_path.iterdir() if file.name != ".lock"]
    for block in blocks:
        content = bytearray(block.read_bytes())
        content[len(content) // 2] ^= 1
        block.write_bytes({"changed": content, "cut": content[:-5], "empty": b""}[damage])
    assert RangeReader(store.filesystem, BlockCache(tmp_path, 2**30)).read(ranges) == expected(ranges)
    assert store.counts().num_gets == 2 * len(blocks)


def test_an_object_that_was_written_again_is_not_served_from_the_cache(store: ObjectStore, tmp_path: Path) -> None:
    for number in range(2):
        with store.filesystem.open_output_stream("bucket/again") as stream:
            stream.write(bytes([number]) * 1000)
        reader = RangeReader(store.filesystem, BlockCache(tmp_path, 2**30))
        assert reader.read([ByteRange("bucket/again", 10, 5)]) == [bytes([number]) * 5]
