"""Test that the cache of blocks stays below its limit and gives the right bytes to threads and processes that share it."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pytest
from process_support import run_together

from pipelines.block_cache import BlockCache


def test_the_cache_never_exceeds_its_limit_and_keeps_what_was_used_last(tmp_path: Path) -> None:
    cache = BlockCache(tmp_path, 10 * 1004)
    fetched: list[str] = []

    def fetch(name: str) -> Callable[[], bytes]:
        def get() -> bytes:
            fetched.append(name)
            return name.encode() * 250

        return get

    def read(name: str) -> bytes:
        file = cache.open(name, 1000, fetch(name))
        assert file is not None
        with file:
            return file.read(1000)

    names = [f"{number:04d}" for number in range(40)]
    for name in names:
        assert read(name) == name.encode() * 250
        assert read("0000") == b"0000" * 250
        assert cache.num_bytes() <= cache.max_bytes
        time.sleep(0.002)  # The clock of the filesystem must go on between two uses.
    assert fetched == names
    assert [name for name in names if cache.holds(name)] == ["0000", *names[-9:]]
    assert cache.open("large", 20_000, fetch("large")) is None
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: cache.fetch(name, 1000, fetch(name)), names * 3))
    assert cache.num_bytes() <= cache.max_bytes


def test_threads_read_the_right_blocks_while_others_make_room(tmp_path: Path) -> None:
    caches = [BlockCache(tmp_path, 5 * 1004) for _ in range(2)]  # as two processes have
    too_large: list[int] = []

    def work(seed: int) -> None:
        for number in np.random.default_rng(seed).integers(12, size=150):
            content = bytes([number]) * 1000
            file = caches[seed % 2].open(f"{number}", 1000, lambda content=content: content)
            if file is not None:  # Otherwise all the room is that of blocks that are being fetched.
                with file:
                    assert file.read(1000) == content
            if (num_bytes := caches[0].num_bytes()) > 5 * 1004:
                too_large.append(num_bytes)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert not too_large


THREADS = """
import random, sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from pipelines.block_cache import BlockCache
cache = BlockCache(Path(sys.argv[1]), 5 * 1004)
print("ready", flush=True)
sys.stdin.readline()
def work(seed):
    numbers = random.Random(seed)
    largest = 0
    for number in (numbers.randrange(12) for _ in range(150)):
        content = bytes([number]) * 1000
        if file := cache.open(f"{number}", 1000, lambda: content):
            with file:
                assert file.read(1000) == content
        largest = max(largest, cache.num_bytes())
    return largest
with ThreadPoolExecutor(4) as pool:
    print(max(pool.map(work, range(4 * int(sys.argv[2]), 4 * int(sys.argv[2]) + 4))))
"""


def test_threads_of_several_processes_stay_below_the_limit_together(tmp_path: Path) -> None:
    outputs = run_together(THREADS, [[str(tmp_path), str(number)] for number in range(3)], dict(os.environ))
    assert all(0 < int(output) <= 5 * 1004 for output in outputs)
    assert BlockCache(tmp_path, 5 * 1004).num_bytes() <= 5 * 1004
    assert not list(tmp_path.glob("*.partial"))


def test_a_block_gets_its_name_only_while_nobody_else_looks_for_room(tmp_path: Path) -> None:
    content = bytes(2**27)  # It takes so long to write that the lock is taken long before it is written.
    with ThreadPoolExecutor(1) as pool:
        opened = pool.submit(BlockCache(tmp_path, 2**28).open, "block", len(content), lambda: content)
        while not (tmp_path / "block.partial").exists() or not (tmp_path / "block.partial").stat().st_size:
            assert not opened.done()
        with (tmp_path / ".lock").open("wb") as lock:  # as another process does that wants to know what room there is
            fcntl.flock(lock, fcntl.LOCK_EX)
            names = {file.name for file in tmp_path.iterdir()}
            time.sleep(0.5)
            assert {file.name for file in tmp_path.iterdir()} == names
        file = opened.result()
    assert file is not None
    file.close()
    assert {file.name for file in tmp_path.iterdir()} == {".lock", "block"}


def test_room_is_made_only_for_a_block_that_will_fit(tmp_path: Path) -> None:
    cache = BlockCache(tmp_path, 3 * 1004)
    for name in ("first", "second"):
        cache.fetch(name, 1000, lambda: bytes(1000))
    assert cache.open("large", 3009, lambda: bytes(3009)) is None
    assert cache.holds("first")
    assert cache.holds("second")


def test_a_block_is_fetched_ahead_although_another_thread_makes_room_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = BlockCache(tmp_path, 2 * 1004)
    for name in ("old", "older"):
        assert cache.fetch(name, 1000, lambda: bytes(1000))
    other = threading.Thread(target=lambda: cache.fetch("other", 1000, lambda: bytes(1000)))
    lock = fcntl.flock

    def make_room_before_locking(file: BinaryIO, operation: int) -> None:
        """Let the other thread remove files that nobody has locked, between the creation of the partial file and its lock."""
        if other.ident is None and os.readlink(f"/proc/self/fd/{file.fileno()}").endswith("block.partial"):
            other.start()
            other.join(1)
        lock(file, operation)

    monkeypatch.setattr("pipelines.file_locks.fcntl.flock", make_room_before_locking)
    assert cache.fetch("block", 1000, lambda: bytes(1000))
    other.join(60)
    assert cache.holds("block")
    assert cache.holds("other")


def test_a_block_whose_fetching_process_died_is_fetched_by_another(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from pipelines.block_cache import BlockCache\n"
        "BlockCache(Path(sys.argv[1]), 10**6).open('block', 7, lambda: os._exit(3))"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == 3
    assert (tmp_path / "block.partial").exists()
    file = BlockCache(tmp_path, 10**6).open("block", 7, lambda: b"content")
    assert file is not None
    with file:
        assert file.read(7) == b"content"
    assert not (tmp_path / "block.partial").exists()


def test_what_a_process_that_died_had_reserved_is_free(tmp_path: Path) -> None:
    for name in ("block", "other"):
        (tmp_path / f"{name}.partial").write_bytes(bytes(1004))
    cache = BlockCache(tmp_path, 2 * 1004)
    assert cache.num_bytes() == 2 * 1004
    for name in ("block", "new"):
        cache.fetch(name, 1000, lambda: bytes(1000))
        assert cache.holds(name)
    assert cache.num_bytes() == 2 * 1004
    assert {file.name for file in tmp_path.iterdir()} == {".lock", "block", "new"}


def test_a_child_that_is_forked_meanwhile_keeps_no_lock(tmp_path: Path) -> None:
    # The child has the file of the lock open for as long as it lives, and others wait for the same block.
    code = """
import os, sys, threading, time
from pathlib import Path
from pipelines.block_cache import BlockCache
cache, children = BlockCache(Path(sys.argv[1]), 10**6), []
def fetch():
    children.append(os.fork())
    if not children[0]:
        sys.stdin.readline()
        os._exit(0)
    other.start()
    time.sleep(0.2)
    return b"content"
other = threading.Thread(target=lambda: cache.open("block", 7, lambda: b"").close())
cache.open("block", 7, fetch).close()
other.join()
assert os.waitpid(children[0], os.WNOHANG) == (0, 0)
"""
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE)
    try:
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        process.communicate()


def test_an_error_while_fetching_reaches_everyone_who_waits(tmp_path: Path) -> None:
    cache, begun = BlockCache(tmp_path, 10**6), threading.Event()

    def fail() -> bytes:
        begun.set()
        time.sleep(0.05)
        raise OSError("the store failed")

    with ThreadPoolExecutor(4) as pool:
        results = [pool.submit(cache.open, "block", 7, fail) for _ in range(4)]
        assert all(isinstance(result.exception(), OSError) for result in results)
    assert not list(tmp_path.glob("block*"))
