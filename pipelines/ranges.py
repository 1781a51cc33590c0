"""Read byte ranges and whole files, local or remote; the blocks of remote files are kept on the node's own disk."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache, partial
from typing import BinaryIO, NamedTuple

import numpy as np
import pyarrow as pa
from pyarrow import fs

from pipelines.archives import resolve_source
from pipelines.block_cache import BlockCache, node_directory
from pipelines.object_store import Block, RemoteObject, is_local, name_object

_NUM_OPEN_FILES = 64
# An object that is open takes no file descriptor, but opening it takes a request.
_NUM_OPEN_OBJECTS = 4096
_NUM_THREADS = 16
_NUM_PREFETCH_THREADS = 4
_MAX_BYTES_AT_A_TIME = 2**26


class ByteRange(NamedTuple):
    """Location of a range of bytes in a file."""

    path: str
    offset: int
    size: int


class RangeReader:
    """Read byte ranges from a filesystem: one after the other if it is local, several in parallel if it is remote.

    Local ranges are read rather than memory-mapped: if a mapped file becomes shorter, accessing it kills the process with
    SIGBUS. Without a cache, which all processes of the node share, every range of a remote file is a request of its own.
    """

    def __init__(self, filesystem: fs.FileSystem, cache: BlockCache | None = None) -> None:
        # Both kinds of files are thread-safe, and it does no harm if two threads open the same one.
        self._filesystem, self._is_local, self._cache = filesystem, is_local(filesystem), cache
        self._open_local = lru_cache(maxsize=_NUM_OPEN_FILES)(filesystem.open_input_file)
        self._open = lru_cache(maxsize=_NUM_OPEN_OBJECTS)(partial(RemoteObject, filesystem))
        self._pool = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="ranges")
        self._prefetch_pool = ThreadPoolExecutor(_NUM_PREFETCH_THREADS, thread_name_prefix="prefetch")
        self._lock = threading.Lock()
        self._request: object = None
        """What was last asked for; None if there was no room for all of it, so that it is tried again."""

    def read(self, ranges: Sequence[ByteRange]) -> list[bytes]:
        """Return the bytes of each range, in order; they are fewer than requested where a file ends inside the range."""
        if self._is_local:
            return [self._open_local(part.path).read_at(part.size, part.offset) for part in ranges]
        list(self._pool.map(self._open, {part.path for part in ranges}))
        return list(self._pool.map(self._read, ranges))

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
        if self._is_local:
            with pa.memory_map(path) as file:
                return file.read_buffer()
        remote = self._open(path)
        if (cached := self._open_block(remote, remote.whole())) is None:
            return pa.py_buffer(remote.read(0, remote.size))
        with cached:
            mapped = mmap.mmap(cached.fileno(), 0, access=mmap.ACCESS_READ)
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
        if self._is_local or self._cache is None or request == self._request:
            return
        self._request = request
        self._cache.now = frozenset(name_object(self._filesystem, path) for path in now)
        self._cache.near = frozenset(name_object(self._filesystem, path) for path in (*later, *before))
        blocks = self._list_blocks((*now, *later), whole)
        for _ in range(_NUM_PREFETCH_THREADS):
            self._prefetch_pool.submit(self._prefetch_next, request, blocks)

    def _list_blocks(self, paths: Iterable[str], whole: bool) -> Iterator[tuple[RemoteObject, Block]]:
        for path in paths:
            with suppress(OSError):  # Whoever reads the file gets the error.
                remote = self._open(path)
                yield from ((remote, block) for block in ([remote.whole()] if whole else remote.blocks(0, remote.size)))

    def _prefetch_next(self, request: object, blocks: Iterator[tuple[RemoteObject, Block]]) -> None:
        """Fetch a block and let the next one be fetched, or give up the request if there is no room for this one."""
        with self._lock:
            remote, block = next(blocks, (None, None)) if self._request is request else (None, None)
        if remote is None or block is None or self._cache is None:
            return
        size = block.end - block.begin
        with suppress(OSError):
            has_room = self._cache.fetch(block.name, size, partial(remote.read, block.begin, size))
            if not has_room and self._request is request:
                self._request = None
        # This raises an error, which nobody sees, at the end of the program, which so waits for no more than what has begun.
        self._prefetch_pool.submit(self._prefetch_next, request, blocks)

    def _open_block(self, remote: RemoteObject, block: Block) -> BinaryIO | None:
        """Open a block in the cache; None if there is no cache, or no room in it."""
        size = block.end - block.begin
        fetch = partial(remote.read, block.begin, size)
        return self._cache.open(block.name, size, fetch) if self._cache else None

    def _read(self, part: ByteRange) -> bytes:
        remote, end = self._open(part.path), part.offset + part.size
        if self._cache is None:
            return remote.read(part.offset, part.size)
        pieces = []
        for block in remote.blocks(part.offset, end):
            first, last = max(part.offset, block.begin), min(end, block.end)
            if (file := self._open_block(remote, block)) is None:  # it would be read again for the next range
                pieces.append(remote.read(first, last - first))
                continue
            with file:
                pieces.append(os.pread(file.fileno(), last - first, first - block.begin))
        return b"".join(pieces)


def gather_rows(shards: np.ndarray, rows: np.ndarray, read: Callable[[int, np.ndarray], pa.Table]) -> pa.Table:
    """Return rows of several shards as one table, in the order of `shards` and `rows` (n,); `read` returns those of one."""
    chosen = [np.flatnonzero(shards == shard) for shard in np.unique(shards)]
    tables = [read(int(shards[places[0]]), rows[places]) for places in chosen]
    if len(tables) == 1:
        return tables[0]
    return pa.concat_tables(tables).take(pa.array(np.argsort(np.concatenate(chosen))))


@lru_cache(maxsize=8)
def range_reader(uri: str, cache_bytes: int = 0) -> RangeReader:
    """Return the process's reader of the filesystem of a URI, with the node's cache of `cache_bytes` for a remote one."""
    filesystem, _ = resolve_source(uri)
    has_cache = cache_bytes > 0 and not is_local(filesystem)
    return RangeReader(filesystem, BlockCache(node_directory(), cache_bytes) if has_cache else None)
