"""The cache of blocks: what makes room for what, its limit, and threads, processes and forks that share it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from server_support import run_together

from pipelines.block_cache import BlockCache

STORED = 1004
"""Size of a block of 1 000 bytes with its checksum."""
ALL_NAMES = [f"{name}-{number}" for name in "abcd" for number in range(3)]
NAMES = st.sampled_from(ALL_NAMES)
STEPS = st.one_of(
    st.tuples(st.just("open"), NAMES),
    st.tuples(st.just("fetch"), NAMES),
    st.tuples(st.just("need"), st.tuples(st.sets(st.sampled_from("abcd")), st.sets(st.sampled_from("abcd")))),
)


def num_bytes(directory: Path) -> int:
    """Return the size of all blocks, including the room that is reserved for some."""
    return sum(path.stat().st_size for path in directory.iterdir())


@given(st.lists(STEPS, min_size=10, max_size=40), st.integers(1, 6))
def test_the_cache_does_what_a_list_of_blocks_does(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, object]], room: int
) -> None:
    """What was not used for longest makes room: for what is read unless it is needed now, for what is fetched unless near."""
    cache = BlockCache(tmp_path_factory.mktemp("cache"), room * STORED)
    held: list[str] = []  # From the one that was not used for longest to the one that was used last.
    now, near = set[str](), set[str]()
    for time_ns, (kind, value) in enumerate(steps, start=1):
        if kind == "need":
            now, near = value  # type: ignore[misc]
            cache.now, cache.near = frozenset(now), frozenset(near)
            continue
        name, fetched = str(value), list[str]()
        is_there = name in held
        if not is_there and len(held) == room:
            kept = now if kind == "open" else now | near
            if removed := next((other for other in held if other[0] not in kept), ""):
                held.remove(removed)
        is_stored = is_there or len(held) < room
        content = name.encode().ljust(1000)
        found = getattr(cache, kind)(name, 1000, lambda get=(fetched, name, content): get[0].append(get[1]) or get[2])
        assert bool(found) == is_stored
        assert fetched == [name] * (is_stored and not is_there), "what is there, or has no room, is not fetched"
        if kind == "open" and found:
            with found:
                assert found.read(1000) == content
        if is_stored and (kind == "open" or not is_there):
            held = [other for other in held if other != name] + [name]
            assert (cache.directory / name).stat().st_mtime_ns > 10**15, "it was not noted that the block is used"
            os.utime(cache.directory / name, ns=(time_ns, time_ns))  # The filesystem's own clock is too coarse.
        assert {name for name in ALL_NAMES if (cache.directory / name).exists()} == set(held)
        assert num_bytes(cache.directory) == len(held) * STORED
    # Room is made only for a block that will fit.
    assert cache.open("e-0", room * STORED, lambda: b"") is None
    assert {name for name in ALL_NAMES if (cache.directory / name).exists()} == set(held)


@pytest.mark.parametrize("damage", ["changed", "cut", "empty"])
def test_a_damaged_block_is_fetched_again(tmp_path: Path, damage: str) -> None:
    BlockCache(tmp_path, 10**6).fetch("block", 1000, lambda: b"first".ljust(1000))
    content = bytearray((tmp_path / "block").read_bytes())
    content[500] ^= 1
    (tmp_path / "block").write_bytes({"changed": content, "cut": content[:-5], "empty": b""}[damage])
    file = BlockCache(tmp_path, 10**6).open("block", 1000, lambda: b"second".ljust(1000))
    assert file is not None
    with file:
        assert file.read(1000) == b"second".ljust(1000)


# ---- threads and processes -------------------------------------------------------------------------------------------

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
        with cache._lock():
            largest = max(largest, sum(path.stat().st_size for path in cache.directory.iterdir()))
    return largest
with ThreadPoolExecutor(4) as pool:
    print(max(pool.map(work, range(4 * int(sys.argv[2]), 4 * int(sys.argv[2]) + 4))))
"""


def test_threads_of_several_processes_read_the_right_blocks_and_stay_below_the_limit(tmp_path: Path) -> None:
    outputs = run_together(THREADS, [[str(tmp_path), str(number)] for number in range(3)], dict(os.environ))
    assert all(0 < int(output) <= 5 * STORED for output in outputs)
    assert num_bytes(tmp_path) <= 5 * STORED
    assert not list(tmp_path.glob("*.partial"))


def test_what_a_process_that_died_had_reserved_is_free(tmp_path: Path) -> None:
    for name in ("block", "other"):
        (tmp_path / f"{name}.partial").write_bytes(bytes(STORED))
    cache = BlockCache(tmp_path, 2 * STORED)
    assert num_bytes(tmp_path) == 2 * STORED
    for name in ("block", "new"):
        cache.fetch(name, 1000, lambda: bytes(1000))
        assert (cache.directory / name).exists()
    assert num_bytes(tmp_path) == 2 * STORED
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
    cache = BlockCache(tmp_path, 10**6)

    def fail() -> bytes:
        time.sleep(0.05)
        raise OSError("the store failed")

    with ThreadPoolExecutor(4) as pool:
        results = [pool.submit(cache.open, "block", 7, fail) for _ in range(4)]
        assert all(isinstance(result.exception(), OSError) for result in results)
    assert not list(tmp_path.glob("block*"))
