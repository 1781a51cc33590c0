"""Reading from a real S3 server: the right bytes in few requests, a cache that holds its window, and a store that fails."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import fs
from s3_support import ObjectStore, run_object_store

from pipelines import object_store, store_errors
from pipelines.archives import list_archives
from pipelines.block_cache import BlockCache
from pipelines.local_copy import local_copy
from pipelines.object_store import RemoteObject, name_object, open_for_reading
from pipelines.ranges import ByteRange, RangeReader
from pipelines.storage import create_directory, read_json, resolve, write_json
from pipelines.store_errors import RETRIES, RefusedWriteError, RetryLog, explain

BLOCK = 2**18
"""Size of a block in these tests, which is 2**23 in the product."""
# Sizes at and around the bounds of blocks; objects shorter than two blocks are one block.
SIZES = {"empty": 0, "small": 1000, "large": 2 * BLOCK - 1, "two": 2 * BLOCK, "rest": 3 * BLOCK + 777}
CONTENTS = {name: np.random.default_rng(size).bytes(size) for name, size in SIZES.items()}
WINDOWS = [[f"bucket/windows/{2 * number}", f"bucket/windows/{2 * number + 1}"] for number in range(3)]
"""Paths of the objects of three windows, each object of two blocks."""
WINDOW_BYTES = 4 * (BLOCK + 4)
TOO_SLOW = settings(suppress_health_check=[HealthCheck.too_slow])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    directory = tmp_path_factory.mktemp("store")
    stored = {f"data/{name}": content for name, content in CONTENTS.items()}
    for number, path in enumerate(itertools.chain(*WINDOWS)):
        stored[path.removeprefix("bucket/")] = bytes([number]) * (2 * BLOCK)
    for path, content in stored.items():
        (directory / path).parent.mkdir(exist_ok=True)
        (directory / path).write_bytes(content)
    with run_object_store(directory / "log") as server:
        for name in ("data", "windows"):
            server.upload(directory / name, f"bucket/{name}")
        yield server


@pytest.fixture
def store(server: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    """Return the server, which does not fail until it is told to; pauses and blocks are short."""
    server.behave()
    monkeypatch.setattr(object_store, "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(store_errors, "_FIRST_PAUSE", 0.001)
    monkeypatch.setattr(store_errors, "_LONGEST_PAUSE", 0.01)
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    return server


def random_ranges(count: int, seed: int = 0) -> list[ByteRange]:
    rng = np.random.default_rng(seed)
    chosen = rng.choice([name for name, size in SIZES.items() if size], size=count)
    return [
        ByteRange(f"bucket/data/{name}", int(rng.integers(SIZES[name])), int(rng.integers(BLOCK))) for name in chosen
    ]


def expected(parts: list[ByteRange]) -> list[bytes]:
    return [CONTENTS[part.path.split("/")[-1]][part.offset :][: part.size] for part in parts]


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# ---- what is read ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache_bytes", [2**30, BLOCK // 2, None])
def test_ranges_and_files_are_those_that_were_stored(
    store: ObjectStore, tmp_path: Path, cache_bytes: int | None
) -> None:
    """With a cache, without one, and with one that has no room for a block."""
    reader = RangeReader(store.filesystem, BlockCache(tmp_path, cache_bytes) if cache_bytes else None)

    @given(st.sampled_from(sorted(SIZES)), st.integers(-40, 40), st.integers(0, 4), st.integers(0, 3 * BLOCK))
    @TOO_SLOW
    def check(name: str, shift: int, block: int, size: int) -> None:
        part = ByteRange(f"bucket/data/{name}", max(0, block * BLOCK + shift), size)
        assert reader.read([part]) == expected([part])

    check()
    store.behave()
    for name, content in CONTENTS.items():
        for _ in range(2):
            assert reader.read_file(f"bucket/data/{name}").to_pybytes() == content
    if cache_bytes != BLOCK // 2:
        assert store.counts().num_bytes == sum(SIZES.values()) * (1 if cache_bytes else 2)


def test_every_byte_is_read_once_in_blocks_although_ranges_are_random_and_readers_many(
    store: ObjectStore, tmp_path: Path
) -> None:
    store.behave(latency=0.1)
    parts = random_ranges(200)
    # Two that read at the same time, as processes of a node do, and one that comes later.
    readers = [RangeReader(store.filesystem, BlockCache(tmp_path, 2**30)) for _ in range(3)]
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda reader: reader.read(parts), readers[:2])) == [expected(parts)] * 2
    assert list(readers[2].stream(parts)) == expected(parts)
    counts = store.counts()
    assert (counts.num_gets, counts.num_bytes) == (1 + 1 + 2 + 3, sum(SIZES.values()))


def test_an_open_file_is_like_a_local_one(store: ObjectStore, tmp_path: Path) -> None:
    (tmp_path / "rest").write_bytes(CONTENTS["rest"])
    size = SIZES["rest"]
    steps = st.one_of(
        st.tuples(st.just("read"), st.integers(0, BLOCK + 5)),
        st.tuples(st.just("seek"), st.integers(0, size + 5)),
        st.tuples(st.just("tell")),
    )

    @given(st.lists(steps, max_size=12))
    @TOO_SLOW
    def check(walk: list[Any]) -> None:
        with (
            open_for_reading(store.filesystem, "bucket/data/rest") as remote,
            (tmp_path / "rest").open("rb") as reference,
        ):
            for name, *arguments in walk:
                assert getattr(remote, name)(*arguments) == getattr(reference, name)(*arguments)

    check()


def test_a_file_is_read_ahead_only_beyond_its_first_block_and_before_its_stop(store: ObjectStore) -> None:
    with open_for_reading(store.filesystem, "bucket/data/rest") as file:
        assert file.read(BLOCK + 1) == CONTENTS["rest"][: BLOCK + 1]
        assert store.counts().num_gets == 1
        assert file.read(1) == CONTENTS["rest"][BLOCK + 1 : BLOCK + 2]
        wait_for(lambda: store.counts().num_gets == 3)
        assert file.read() == CONTENTS["rest"][BLOCK + 2 :]
    assert store.counts().num_gets == 4
    store.behave()
    stop = 2 * BLOCK + 100
    with open_for_reading(store.filesystem, "bucket/data/rest", stop=stop) as file:
        file.seek(50)
        assert file.read(stop - 50) == CONTENTS["rest"][50:stop]
    assert (store.counts().num_gets, store.counts().num_bytes) == (2, stop - 50)


def test_versions_of_an_object_share_the_beginning_of_their_names_but_no_blocks(
    store: ObjectStore, tmp_path: Path
) -> None:
    keys = []
    for number in range(2):
        with store.filesystem.open_output_stream("bucket/again") as stream:
            stream.write(bytes([number]) * 1000)
        reader = RangeReader(store.filesystem, BlockCache(tmp_path, 2**30))
        assert reader.read([ByteRange("bucket/again", 10, 5)]) == [bytes([number]) * 5]
        keys.append(RemoteObject(store.filesystem, "bucket/again").key)
    assert keys[0] != keys[1]
    assert {key.partition("-")[0] for key in keys} == {name_object(store.filesystem, "bucket/again")}
    assert name_object(store.filesystem, "bucket/other") != name_object(store.filesystem, "bucket/again")


# ---- windows ---------------------------------------------------------------------------------------------------------


def read_window(reader: RangeReader, window: list[str], seed: int = 0) -> None:
    """Read ranges of a window in random order, as samples are read."""
    rng = np.random.default_rng(seed)
    for _ in range(60):
        path = window[rng.integers(len(window))]
        (data,) = reader.read([ByteRange(path, int(rng.integers(2 * BLOCK - 1000)), 1000)])
        assert data == bytes([int(path[-1])]) * 1000


def num_held(cache: BlockCache, store: ObjectStore, paths: list[str]) -> int:
    """Return how many blocks of some objects the cache holds."""
    names = {name_object(store.filesystem, path) for path in paths}
    return sum(file.name.partition("-")[0] in names and file.suffix == "" for file in cache.directory.iterdir())


@pytest.mark.parametrize("num_windows", [1.0, 1.5, 3.0])
def test_every_block_is_fetched_once_if_the_cache_holds_a_window(
    store: ObjectStore, tmp_path: Path, num_windows: float
) -> None:
    cache = BlockCache(tmp_path, int(num_windows * WINDOW_BYTES))
    reader = RangeReader(store.filesystem, cache)
    for before, window, later in zip([[], *WINDOWS], WINDOWS, [*WINDOWS[1:], []], strict=False):
        reader.prefetch(window, later, before)
        read_window(reader, window)
        reader.prefetch(window, later)
        read_window(reader, window, seed=1)
        room = min(4, int(4 * num_windows) - 4) if later else 0
        wait_for(lambda names=later, room=room: num_held(cache, store, names) >= room)
        assert num_held(cache, store, window) == 4
    assert (store.counts().num_gets, store.counts().num_bytes) == (12, 12 * BLOCK)


# ---- a store that fails, refuses, or is not there --------------------------------------------------------------------


class FlakyFile:
    """A file whose first reads fail, in turn with an error and with an answer that is cut."""

    def __init__(self, file: Any, num_failures: int) -> None:
        self.file, self.num_failures = file, num_failures

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def read_at(self, num_bytes: int, offset: int) -> bytes:
        self.num_failures -= 1
        if self.num_failures >= 0 and self.num_failures % 2:
            raise OSError("AWS Error SLOW_DOWN during GetObject operation: ")
        data: bytes = self.file.read_at(num_bytes, offset)
        return data[:-1] if self.num_failures >= 0 else data


def test_reads_are_repeated_after_errors_and_cut_answers_which_is_counted_and_ends(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, num_failures = RemoteObject.__init__, 0

    def begin_flaky(remote: RemoteObject, filesystem: fs.FileSystem, path: str) -> None:
        """Let the first reads of every object fail, behind pyarrow's client, which tries again itself."""
        begin(remote, filesystem, path)
        remote._file = FlakyFile(remote._file, num_failures)

    monkeypatch.setattr(RemoteObject, "__init__", begin_flaky)
    RETRIES.take()
    for num_failures in (0, 7):
        remote = RemoteObject(store.filesystem, "bucket/data/small")
        assert remote.read(0, 1000) == CONTENTS["small"]
        assert RETRIES.take() == num_failures
    num_failures = 8
    with pytest.raises(OSError, match=r"^s3://bucket/data/small: the store failed, also when asked again"):
        RemoteObject(store.filesystem, "bucket/data/small").read(0, 1000)
    assert (RETRIES.take(), RETRIES.take()) == (7, 0)
    # Nothing is lost by whoever reads ranges.
    num_failures = 6
    parts = random_ranges(60)
    for cache in (None, BlockCache(tmp_path / "cache", 2**30)):
        assert RangeReader(store.filesystem, cache).read(parts) == expected(parts)
    monkeypatch.setenv("TEMPNET_MODELS", str(tmp_path / "copies"))
    copy = Path(local_copy("s3://bucket/data"))
    assert {file.name: file.read_bytes() for file in copy.iterdir()} == CONTENTS


def test_small_files_are_read_and_written_while_the_store_answers_503(store: ObjectStore) -> None:
    """An answer 503 that is longer than the object is one of the errors that pyarrow does not repeat."""
    write_json("s3://bucket/state.json", {"step": 20})
    store.behave(share_failing=0.4)
    for step in range(8):
        assert read_json("s3://bucket/state.json") == {"step": 20}
        write_json("s3://bucket/other.json", {"step": step})
    assert store.counts().num_failed > 0
    store.behave()
    assert read_json("s3://bucket/other.json") == {"step": 7}


def test_an_object_that_is_gone_is_named_at_once(store: ObjectStore, tmp_path: Path) -> None:
    reader = RangeReader(store.filesystem, BlockCache(tmp_path, 2**30))
    assert reader.read([ByteRange("bucket/data/rest", 0, 10)]) == [CONTENTS["rest"][:10]]
    store.behave(gone="rest")
    RETRIES.take()
    for call in (
        lambda: reader.read([ByteRange("bucket/data/rest", 2 * BLOCK, 10)]),
        lambda: open_for_reading(store.filesystem, "bucket/data/rest"),
    ):
        with pytest.raises(FileNotFoundError, match="s3://bucket/data/rest: there is no such object"):
            call()
    assert RETRIES.take() == 0


def test_a_store_that_refuses_or_lacks_the_bucket_is_explained(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads, writes = (list_archives, read_json), (create_directory, lambda uri: write_json(uri, {}))
    store.behave(refuses_writes=True)
    for write in writes:
        wanted = (
            "^s3://bucket/new: the store refuses to write there: check that AWS_ACCESS_KEY_ID .* permission to write"
        )
        with pytest.raises(RefusedWriteError, match=wanted):
            write("s3://bucket/new")
    assert read_json("s3://bucket/new") is None
    store.behave()
    for write in writes:
        write("s3://bucket/new")
    for call in (list_archives, writes[1]):
        with pytest.raises(FileNotFoundError, match=r"^s3://bucket2/data: there is no such bucket"):
            call("s3://bucket2/data")
    with pytest.raises(FileNotFoundError, match="no such file or directory"):
        list_archives("s3://bucket/absent")
    store.behave(needs_keys=True)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    for read in reads:
        with pytest.raises(
            PermissionError, match=r"^s3://bucket/data: the store refuses access: set AWS_ACCESS_KEY_ID"
        ):
            read("s3://bucket/data")


UNREACHABLE = r"^s3://bucket/data: the store cannot be reached: set AWS_ENDPOINT_URL"


def test_a_store_that_cannot_be_reached_is_explained() -> None:
    error = OSError(
        "AWS Error NETWORK_CONNECTION during ListObjectsV2 operation: curlCode: 7, Couldn't connect to server"
    )
    with pytest.raises(ConnectionError, match=UNREACHABLE):
        raise explain(error, "s3://bucket/data")


def test_a_filesystem_that_was_pickled_asks_a_store_again_as_often_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """pyarrow's own gives up after three answers 503, as Ray's processes would, which get it pickled."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            asked.append(self.path)
            self.send_response(503 if len(asked) <= 5 else 200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, "testing")
        uri = f"s3://bucket/key?scheme=http&region=us-east-1&endpoint_override=127.0.0.1:{server.server_port}"
        ours, path = resolve(uri)
        assert deepcopy(ours).get_file_info(path).is_file
        assert len(asked) == 6
        asked.clear()
        with pytest.raises(OSError, match=r"503|SLOW_DOWN|UNAVAILABLE|UNKNOWN"):
            deepcopy(fs.FileSystem.from_uri(uri)[0]).get_file_info(path)
        server.shutdown()


def test_a_line_is_said_at_once_and_then_once_a_minute_with_what_is_new() -> None:
    now, lines = [1000.0], list[str]()
    log = RetryLog(lines.append, 5, clock=lambda: now[0])
    log.add(0)
    assert not lines
    for seconds, number in [(0, 3), (30, 5), (59, 1), (60, 0), (119, 1), (121, 0), (500, 0)]:
        now[0] = 1000.0 + seconds
        log.add(number)
    what = "requests to an object store failed and were repeated"
    assert lines == [f"{what}: 3; 8 so far", f"{what}: 6; 14 so far", f"{what}: 1; 15 so far"]
