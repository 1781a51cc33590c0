"""Read byte ranges and whole files, local or remote; the blocks of remote files are kept on the node's own disk."""

from __future__ import annotations

import mmap
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from pyarrow import fs

from pipelines.archives import resolve_source
from pipelines.block_cache import BlockCache, node_directory
from pipelines.object_store import RemoteObject, is_local, name_object

_NUM_OPEN_FILES = 64
# An object that is open takes no file descriptor, but opening it takes a request.
_NUM_OPEN_OBJECTS = 4096
_NUM_THREADS = 16
_NUM_PREFETCH_THREADS = 4
_MAX_BYTES_AT_A_TIME = 2**26
# Paths that are read now, that are read next, and that were read before.
_Request = tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]


class ByteRange(NamedTuple):
    """Location of a range of bytes in a file."""

    path: str
    offset: int
    size: int


class RangeReader:
    """Read byte ranges from a filesystem: one after the other if it is local, several in parallel if it is remote.

    Local files are read rather than memory-mapped: if a mapped file becomes shorter, accessing it kills the process with
    SIGBUS, whereas a read returns fewer bytes. The cache keeps the blocks of remote files for every process of the node;
    without it, every range of a remote file is a request of its own.
    """

    def __init__(self, filesystem: fs.FileSystem, cache: BlockCache | None = None) -> None:
        # Both kinds of files are thread-safe, and it does no harm if two threads open the same one.
        self._filesystem = filesystem
        self._open_local = lru_cache(maxsize=_NUM_OPEN_FILES)(filesystem.open_input_file)
        self._open = lru_cache(maxsize=_NUM_OPEN_OBJECTS)(partial(RemoteObject, filesystem))
        self._cache = cache
        self._pool: ThreadPoolExecutor | None = None
        if not is_local(filesystem):
            self._pool = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="ranges")
        self._prefetcher = Prefetcher()
        self._request: _Request | None = None
        """What was last asked for; None if there was no room for all of it, so that it is tried again."""

    def read(self, ranges: Sequence[ByteRange]) -> list[bytes]:
        """Return the bytes of each range, in order; they are fewer than requested where a file ends inside the range."""
        if self._pool is None:
            return [self._open_local(part.path).read_at(part.size, part.offset) for part in ranges]
        if self._cache is None:
            return list(self._pool.map(self._read, ranges))
        list(self._pool.map(self._open, {part.path for part in ranges}))
        blocks = {(part.path, block) for part in ranges for block in self._blocks(part)}
        missing = [block for block in blocks if not self._cache.holds(self._block(*block)[0])]
        list(self._pool.map(lambda block: self._fetch(*block), missing))
        return [self._read_cached(part, self._cache) for part in ranges]

    def stream(self, ranges: Sequence[ByteRange]) -> Iterator[bytes]:
        """Yield what `read` returns, item by item; memory holds at most 64 MiB, or a single range if it is longer."""
        first, num_bytes = 0, 0
        for number, part in enumerate(ranges):
            if number > first and num_bytes + part.size > _MAX_BYTES_AT_A_TIME:
                yield from self.read(ranges[first:number])
                first, num_bytes = number, 0
            num_bytes += part.size
        yield from self.read(ranges[first:])

    def read_file(self, path: str) -> pa.Buffer:
        """Return the content of a file; a local one, and one of which the cache holds everything, is memory-mapped."""
        if self._pool is None:
            with pa.memory_map(path) as file:
                return file.read_buffer()
        remote = self._open(path)
        whole = None
        if self._cache:
            whole = self._cache.open(f"{remote.key}-whole", remote.size, partial(self._get_file, path))
        if whole is None:
            return pa.py_buffer(self._get_file(path))
        with whole:
            mapped = mmap.mmap(whole.fileno(), 0, access=mmap.ACCESS_READ)
            return pa.py_buffer(mapped).slice(0, remote.size)

    def prefetch(
        self, now: Sequence[str], later: Sequence[str] = (), before: Sequence[str] = (), *, whole: bool = False
    ) -> None:
        """Fetch files into the cache, if there is one, in the background: those read `now`, then those read `later`.

        No block of the files of `now` makes room for another, and none of `later` and `before` (which another process may
        still read) for one that is fetched ahead. A call replaces the one before. Fetching ends when the cache has no room
        beside these files, and the same call, repeated, begins it again. Errors of the store come when the file is read.
        `whole` is for files that are read by `read_file` rather than by `read`.
        """
        request = tuple(now), tuple(later), tuple(before)
        if self._pool is None or self._cache is None or request == self._request:
            return
        self._request = request
        self._cache.now = frozenset(name_object(self._filesystem, path) for path in now)
        self._cache.near = frozenset(name_object(self._filesystem, path) for path in (*later, *before))
        self._prefetcher.replace([partial(self._begin_prefetch, request, (*now, *later), whole)])

    def _begin_prefetch(self, request: _Request, paths: Sequence[str], whole: bool) -> None:
        """Let the blocks of the first file be fetched, and then those of the others, unless the request was replaced."""
        if not paths or self._request is not request:
            return
        calls: list[Callable[[], object]] = []
        with suppress(OSError):  # Whoever reads the file gets the error.
            path, remote = paths[0], self._open(paths[0])
            if whole:
                blocks = [(f"{remote.key}-whole", remote.size, partial(self._get_file, path))]
            else:
                numbers = range(remote.num_blocks)
                blocks = [(*self._block(path, block), partial(self._get_block, path, block)) for block in numbers]
            calls += [partial(self._prefetch_block, request, *block) for block in blocks]
        self._prefetcher.insert([*calls, partial(self._begin_prefetch, request, paths[1:], whole)])

    def _prefetch_block(self, request: _Request, name: str, num_bytes: int, fetch: Callable[[], bytes]) -> None:
        """Fetch a block, or give up what is still to be fetched for the request if there is no room for this one."""
        assert self._cache is not None
        if self._request is request and not self._cache.fetch(name, num_bytes, fetch) and self._request is request:
            self._request = None

    def _read(self, part: ByteRange) -> bytes:
        return self._open(part.path).read(part.offset, part.size)

    def _read_cached(self, part: ByteRange, cache: BlockCache) -> bytes:
        pieces = []
        end = part.offset + part.size
        for block in self._blocks(part):
            begin, block_end = self._open(part.path).bounds(block)
            first, last = max(part.offset, begin), min(end, block_end)
            file = cache.open(*self._block(part.path, block), partial(self._get_block, part.path, block))
            if file is None:  # There is no room for the block, so it would be read again for the next range.
                pieces.append(self._open(part.path).read(first, last - first))
                continue
            with file:
                pieces.append(os.pread(file.fileno(), last - first, first - begin))
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _blocks(self, part: ByteRange) -> range:
        """Return the numbers of the blocks that a range lies in."""
        remote = self._open(part.path)
        last = min(part.offset + part.size, remote.size) - 1
        return range(remote.block_at(part.offset), remote.block_at(last) + 1) if part.offset <= last else range(0)

    def _block(self, path: str, block: int) -> tuple[str, int]:
        """Return the name and the size of a block in the cache."""
        remote = self._open(path)
        begin, end = remote.bounds(block)
        return f"{remote.key}-{block:06d}", end - begin

    def _fetch(self, path: str, block: int) -> None:
        assert self._cache is not None
        if file := self._cache.open(*self._block(path, block), partial(self._get_block, path, block)):
            file.close()

    def _get_block(self, path: str, block: int) -> bytes:
        begin, end = self._open(path).bounds(block)
        return self._open(path).read(begin, end - begin)

    def _get_file(self, path: str) -> bytes:
        return b"".join(self._get_block(path, block) for block in range(self._open(path).num_blocks))


def gather_rows(shards: np.ndarray, rows: np.ndarray, read: Callable[[int, np.ndarray], pa.Table]) -> pa.Table:
    """Return rows of several shards as one table, in the order of `shards` and `rows` (n,); `read` returns those of one."""
    chosen = [np.flatnonzero(shards == shard) for shard in np.unique(shards)]
    tables = [read(int(shards[places[0]]), rows[places]) for places in chosen]
    if len(tables) == 1:
        return tables[0]
    return pa.concat_tables(tables).take(pa.array(np.argsort(np.concatenate(chosen))))


class Prefetcher:
    """A few threads that call functions in order; the end of the program waits for no more than those that have begun."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], object]] = deque()
        self._lock = threading.Lock()
        self._num_threads = 0

    def replace(self, calls: Sequence[Callable[[], object]]) -> None:
        """Replace the functions that wait by others."""
        with self._lock:
            self._waiting = deque(calls)
        self._start()

    def insert(self, calls: Sequence[Callable[[], object]]) -> None:
        """Let functions come before those that wait."""
        with self._lock:
            self._waiting.extendleft(reversed(calls))
        self._start()

    def _start(self) -> None:
        with self._lock:
            while self._num_threads < min(_NUM_PREFETCH_THREADS, len(self._waiting)):
                self._num_threads += 1
                threading.Thread(target=self._work, name="read-ahead").start()

    def _work(self) -> None:
        while True:
            with self._lock:
                # The interpreter ends the main thread before it waits for the others.
                if not self._waiting or not threading.main_thread().is_alive():
                    self._num_threads -= 1
                    return
                call = self._waiting.popleft()
            with suppress(OSError):
                call()


@lru_cache(maxsize=8)
def range_reader(uri: str, cache_bytes: int = 0) -> RangeReader:
    """Return the process's reader of the filesystem of a URI, with the node's cache of `cache_bytes` for a remote one."""
    filesystem, _ = resolve_source(uri)
    has_cache = cache_bytes > 0 and not is_local(filesystem)
    return RangeReader(filesystem, BlockCache(node_directory(), cache_bytes) if has_cache else None)
