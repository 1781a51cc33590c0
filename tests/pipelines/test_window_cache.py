"""Test that a node's cache keeps what the window that is read needs, and gives its room to the next window in time."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from s3_support import ObjectStore

from pipelines import ranges
from pipelines.block_cache import BlockCache, Need, Needs
from pipelines.object_store import BLOCK_BYTES, RemoteObject, name_object
from pipelines.ranges import ByteRange, RangeReader

STORED = 1004
"""Size of a block of 1 000 bytes with its checksum."""


def block(name: str) -> bytes:
    return name.encode().ljust(1000)


def read(cache: BlockCache, name: str) -> bool:
    """Read a block, check its content, and return whether the cache had room for it."""
    file = cache.open(name, 1000, lambda: block(name))
    if file is None:
        return False
    with file:
        assert file.read(1000) == block(name)
    return True


def fetch(cache: BlockCache, name: str) -> bool:
    return cache.fetch(name, 1000, lambda: block(name))


def test_what_is_read_replaces_others_then_what_is_near_and_never_its_own_window(tmp_path: Path) -> None:
    cache = BlockCache(tmp_path, 4 * STORED)
    for name in ("near-0", "other-0", "now-0", "near-1"):
        assert fetch(cache, name)
        time.sleep(0.002)  # The clock of the filesystem must go on between two uses.
    cache.needs = Needs(now=frozenset({"now"}), near=frozenset({"near"}))
    for name, replaced in (("now-1", "other-0"), ("now-2", "near-0"), ("now-3", "near-1")):
        assert cache.holds(replaced)
        assert read(cache, name)
        assert not cache.holds(replaced)
    for name in ("now-4", "near-2", "other-1"):
        assert not read(cache, name)
    assert all(cache.holds(f"now-{number}") for number in range(4))


def test_what_is_fetched_ahead_replaces_only_what_is_not_needed(tmp_path: Path) -> None:
    cache = BlockCache(tmp_path, 3 * STORED)
    for name in ("before-0", "now-0", "other-0"):
        assert fetch(cache, name)
    cache.needs = Needs(now=frozenset({"now"}), near=frozenset({"later", "before"}))
    fetched: list[str] = []
    assert fetch(cache, "later-0")
    assert not cache.fetch("now-1", 1000, lambda: fetched.append("now-1") or block("now-1"))
    assert not cache.fetch("later-1", 1000, lambda: fetched.append("later-1") or block("later-1"))
    assert not fetched, "a block was fetched although there is no room for it"
    assert [cache.holds(name) for name in ("before-0", "now-0", "later-0", "other-0")] == [True, True, True, False]
    cache.needs = Needs(now=frozenset({"now"}), near=frozenset({"later"}))
    assert fetch(cache, "later-1")
    assert not cache.holds("before-0")


NAMES = st.sampled_from([f"{name}-{number}" for name in ("a", "b", "c", "d") for number in range(3)])
STEPS = st.one_of(
    st.tuples(st.just("read"), NAMES),
    st.tuples(st.just("fetch"), NAMES),
    st.tuples(st.just("need"), st.tuples(st.sets(st.sampled_from("abcd")), st.sets(st.sampled_from("abcd")))),
)


@given(st.lists(STEPS, max_size=40), st.integers(1, 6))
@settings(max_examples=100, deadline=None)
def test_the_cache_does_what_a_list_of_blocks_does(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, object]], room: int
) -> None:
    cache = BlockCache(tmp_path_factory.mktemp("cache"), room * STORED)
    held: list[str] = []  # From the one that was not used for longest to the one that was used last.
    now, near = set[str](), set[str]()

    def level(name: str) -> int:
        return 2 if name[0] in now else 1 if name[0] in near else 0

    for time_ns, (kind, value) in enumerate(steps, start=1):
        if kind == "need":
            now, near = value  # type: ignore[misc]
            cache.needs = Needs(frozenset(now), frozenset(near))
            continue
        name = str(value)
        is_there = name in held
        if not is_there and len(held) == room:
            limit = min(level(name), 1) if kind == "read" else 0
            candidates = sorted((level(other), at) for at, other in enumerate(held) if level(other) <= limit)
            if candidates:
                del held[candidates[0][1]]
        is_stored = is_there or len(held) < room
        assert (read if kind == "read" else fetch)(cache, name) == is_stored
        if is_stored and (kind == "read" or not is_there):
            held = [other for other in held if other != name] + [name]
            os.utime(cache.directory / name, ns=(time_ns, time_ns))  # The filesystem's own clock is too coarse.
        assert {name for name in (f"{a}-{n}" for a in "abcd" for n in range(3)) if cache.holds(name)} == set(held)
    assert Needs(frozenset("a"), frozenset("ab")).of("a-0") is Need.NOW


WINDOWS = [["first", "second"], ["third", "fourth"], ["fifth", "sixth"]]
"""Objects of three windows, each of two blocks."""
WINDOW_BYTES = 4 * (BLOCK_BYTES + 4)


@pytest.fixture
def windows(store: ObjectStore) -> list[list[str]]:
    """Store the objects of the windows and return their paths."""
    paths = [[f"bucket/windows/{name}" for name in names] for names in WINDOWS]
    for number, path in enumerate(path for window in paths for path in window):
        with store.filesystem.open_output_stream(path) as stream:
            stream.write(bytes([number]) * (2 * BLOCK_BYTES))
    store.behave()
    return paths


def read_window(reader: RangeReader, window: list[str], seed: int = 0) -> None:
    """Read ranges of a window in random order, as samples are read."""
    rng = np.random.default_rng(seed)
    for _ in range(60):
        number = int(rng.integers(len(window)))
        (data,) = reader.read([ByteRange(window[number], int(rng.integers(2 * BLOCK_BYTES - 1000)), 1000)])
        assert len(set(data)) == 1
        assert len(data) == 1000


@pytest.mark.parametrize("num_windows", [1.0, 1.5, 2.0, 3.0])
def test_every_block_is_fetched_once_if_the_cache_holds_a_window(
    store: ObjectStore, windows: list[list[str]], tmp_path: Path, num_windows: float
) -> None:
    cache = BlockCache(tmp_path, int(num_windows * WINDOW_BYTES))
    reader = RangeReader(store.filesystem, cache)
    for number, window in enumerate(windows):
        later = windows[number + 1] if number + 1 < len(windows) else []
        before = windows[number - 1] if number else []
        reader.read_ahead(window, later, before)
        read_window(reader, window)
        reader.read_ahead(window, later)
        read_window(reader, window, seed=1)
        room = min(4, int(4 * num_windows) - 4) if later else 0
        wait_for(lambda names=later, room=room: num_held(cache, store, names) >= room)
        assert num_held(cache, store, window) == 4
    assert store.counts().num_gets == 12
    assert store.counts().num_bytes == 24 * BLOCK_BYTES // 2


def test_a_fetch_without_room_does_not_end_the_request_that_has_replaced_its_own(
    store: ObjectStore, windows: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranges, "_NUM_THREADS_AHEAD", 1)
    cache = BlockCache(tmp_path, 2 * WINDOW_BYTES)
    reader = RangeReader(store.filesystem, cache)
    begun, replaced = threading.Event(), threading.Event()
    fetch = cache.fetch

    def fetch_in_vain_at_first(name: str, num_bytes: int, get: Callable[[], bytes]) -> bool:
        if begun.is_set():
            return fetch(name, num_bytes, get)
        begun.set()
        assert replaced.wait(60)
        return False

    monkeypatch.setattr(cache, "fetch", fetch_in_vain_at_first)
    reader.read_ahead(windows[0], windows[1])
    assert begun.wait(60)
    reader.read_ahead(windows[1], windows[2])
    replaced.set()
    wait_for(lambda: num_held(cache, store, windows[1]) == num_held(cache, store, windows[2]) == 4, seconds=30)
    assert num_held(cache, store, windows[0]) == 0


def test_a_block_that_a_replaced_request_had_no_room_for_is_fetched_for_the_one_that_replaced_it(
    store: ObjectStore, windows: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranges, "_NUM_THREADS_AHEAD", 2)
    cache = BlockCache(tmp_path, 2 * WINDOW_BYTES)
    reader = RangeReader(store.filesystem, cache)
    begun, replaced, attempts = threading.Event(), threading.Event(), itertools.count()
    reserve = cache._reserve

    def reserve_in_vain_at_first(*arguments: Any) -> bool:
        if next(attempts):
            return reserve(*arguments)
        begun.set()
        assert replaced.wait(60)
        return False

    monkeypatch.setattr(cache, "_reserve", reserve_in_vain_at_first)
    reader.read_ahead(windows[0])
    assert begun.wait(60)
    reader.read_ahead(windows[0], windows[1])
    # All are there but the one that the first request is still busy with.
    wait_for(lambda: num_held(cache, store, [*windows[0], *windows[1]]) == 7)
    replaced.set()
    wait_for(lambda: num_held(cache, store, windows[0]) == 4, seconds=30)


def test_a_slower_reader_finds_its_window_while_a_faster_one_begins_the_next(
    store: ObjectStore, windows: list[list[str]], tmp_path: Path
) -> None:
    slow, fast = (RangeReader(store.filesystem, BlockCache(tmp_path, 2 * WINDOW_BYTES)) for _ in range(2))
    for reader in (slow, fast):
        reader.read_ahead(windows[0], windows[1])
        read_window(reader, windows[0])
    cache = BlockCache(tmp_path, 2 * WINDOW_BYTES)
    wait_for(lambda: num_held(cache, store, windows[1]) == 4)
    # What the slower reader has asked for is there, but a thread of it that comes late would fetch what was removed again.
    wait_for(lambda: slow._ahead._num_threads == 0)
    fast.read_ahead(windows[1], windows[2], windows[0])
    read_window(fast, windows[1])
    read_window(slow, windows[0], seed=1)
    assert store.counts().num_gets == 8
    fast.read_ahead(windows[1], windows[2])
    wait_for(lambda: num_held(cache, store, windows[2]) == 4)
    assert num_held(cache, store, windows[0]) == 0
    assert store.counts().num_gets == 12


def num_held(cache: BlockCache, store: ObjectStore, paths: list[str]) -> int:
    """Return how many blocks of some objects the cache holds."""
    names = {name_object(store.filesystem, path) for path in paths}
    return sum(file.name.partition("-")[0] in names and file.suffix == "" for file in cache.directory.iterdir())


def wait_for(condition: object, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_all_versions_of_an_object_have_the_beginning_of_their_names_in_common(store: ObjectStore) -> None:
    keys = []
    for number in range(2):
        with store.filesystem.open_output_stream("bucket/again") as stream:
            stream.write(bytes([number]) * 1000)
        keys.append(RemoteObject(store.filesystem, "bucket/again").key)
    assert keys[0] != keys[1]
    assert {key.partition("-")[0] for key in keys} == {name_object(store.filesystem, "bucket/again")}
    assert name_object(store.filesystem, "bucket/other") != name_object(store.filesystem, "bucket/again")
