"""Ranges of bytes of many files, local or remote; a file that is not as it was is named."""

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
    """Where some bytes lie."""

    path: str
    offset: int
    size: int


class RangeReader:
    """Reads ranges from the filesystem of a URI: a local one range by range, a remote one several at a time.

    Local files are read, not mapped into memory: a mapped file that becomes shorter ends the process with SIGBUS, where
    a read comes back short and can be reported.
    """

    def __init__(self, filesystem: fs.FileSystem) -> None:
        self._filesystem = filesystem
        # Arrow's random-access files may be read from several threads, and files may be open more than once.
        self._open = lru_cache(maxsize=_NUM_OPEN_FILES)(filesystem.open_input_file)
        is_local = isinstance(filesystem, fs.LocalFileSystem)
        self._pool = None if is_local else ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="ranges")

    def read(self, ranges: Sequence[ByteRange]) -> list[bytes]:
        """The bytes of each range, in order; fewer than asked for where a file ends before.

        Raises:
            OSError: if a file is gone or cannot be read.
        """
        return list(self._pool.map(self._read, ranges) if self._pool else map(self._read, ranges))

    def stream(self, ranges: Sequence[ByteRange]) -> Iterator[bytes]:
        """The same one after the other; memory holds 64 MiB of them, or a single one that is longer.

        Raises:
            OSError: as `read`.
        """
        first, num_bytes = 0, 0
        for number, wanted in enumerate(ranges):
            if number > first and num_bytes + wanted.size > _MAX_BYTES_AT_A_TIME:
                yield from self.read(ranges[first:number])
                first, num_bytes = number, 0
            num_bytes += wanted.size
        yield from self.read(ranges[first:])

    def _read(self, wanted: ByteRange) -> bytes:
        file: pa.NativeFile = self._open(wanted.path)
        data: bytes = file.read_at(wanted.size, wanted.offset)
        return data


@lru_cache(maxsize=4)
def range_reader(uri: str) -> RangeReader:
    """The reader for a URI's filesystem, one a process."""
    return RangeReader(resolve(uri)[0])
