"""Read byte ranges from many files on a local or remote filesystem."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import NamedTuple

import pyarrow as pa
from pyarrow import fs

from pipelines.storage import resolve

_NUM_OPEN_FILES = 64
_NUM_THREADS = 16
_MAX_BYTES_AT_A_TIME = 2**26


class ByteRange(NamedTuple):
    """Location of a range of bytes in a file."""

    path: str
    """Path of the file within its filesystem."""
    offset: int
    """Position of the first byte in the file."""
    size: int
    """Number of bytes."""


class RangeReader:
    """Read byte ranges from a filesystem: one after the other if it is local, several in parallel if it is remote.

    Local files are read rather than memory-mapped: if a mapped file becomes shorter, accessing it kills the process
    with SIGBUS, whereas a read returns fewer bytes, which can be reported.
    """

    def __init__(self, filesystem: fs.FileSystem) -> None:
        self._filesystem = filesystem
        # This is thread-safe: several threads may read from one of Arrow's random-access files, and it does no harm if
        # two threads open the same file.
        self._open = lru_cache(maxsize=_NUM_OPEN_FILES)(filesystem.open_input_file)
        is_local = isinstance(filesystem, fs.LocalFileSystem)
        self._pool = None if is_local else ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="ranges")

    def read(self, ranges: Sequence[ByteRange]) -> list[bytes]:
        """Return the bytes of each range, in order; they are fewer than requested where a file ends inside the range.

        Raises:
            OSError: if a file no longer exists or cannot be read.
        """
        return list(self._pool.map(self._read, ranges) if self._pool else map(self._read, ranges))

    def stream(self, ranges: Sequence[ByteRange]) -> Iterator[bytes]:
        """Yield what `read` returns, item by item; memory holds at most 64 MiB, or a single range if it is longer.

        Raises:
            OSError: if a file no longer exists or cannot be read.
        """
        first, num_bytes = 0, 0
        for number, part in enumerate(ranges):
            if number > first and num_bytes + part.size > _MAX_BYTES_AT_A_TIME:
                yield from self.read(ranges[first:number])
                first, num_bytes = number, 0
            num_bytes += part.size
        yield from self.read(ranges[first:])

    def _read(self, part: ByteRange) -> bytes:
        file: pa.NativeFile = self._open(part.path)
        data: bytes = file.read_at(part.size, part.offset)
        return data


@lru_cache(maxsize=4)
def range_reader(uri: str) -> RangeReader:
    """Return the reader for a URI's filesystem; it is cached, so that a process has one reader per URI."""
    return RangeReader(resolve(uri)[0])
