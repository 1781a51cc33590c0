"""Read objects of a remote filesystem (S3, GCS, HDFS, …) in large ranges, and ask again where the store fails.

An object store answers a request after tens of milliseconds and bills each one, so an object is read in ranges of 8 MiB
(`BLOCK_BYTES`) and more, several at a time, wherever it has so many bytes.
"""

from __future__ import annotations

import io
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from os import environ
from types import TracebackType
from typing import Protocol, Self, TypeVar

import pyarrow as pa
from pyarrow import fs

from pipelines.store_errors import RETRIES, explain, is_final

Result = TypeVar("Result")

BLOCK_BYTES = 2**23
"""Size of a block, the unit in which objects are read. The last block of an object has the rest too, up to twice that."""

_NUM_ATTEMPTS = 8
_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 5.0  # in seconds
_NUM_BLOCKS_AHEAD = 3
_ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "STORAGE_EMULATOR_HOST")
# Separate from the global generator, whose state is not this module's to change.
_jitter = random.Random()


@dataclass(slots=True)
class Traffic:
    """What this process has read from object stores."""

    num_gets: int = 0
    """Number of ranges that were read."""
    num_bytes: int = 0
    """Number of bytes in them."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, *, num_gets: int = 0, num_bytes: int = 0) -> None:
        """Add to the counts; threads may do so at the same time."""
        with self._lock:
            self.num_gets += num_gets
            self.num_bytes += num_bytes


TRAFFIC = Traffic()
"""What this process has read from object stores so far."""


class InputFile(Protocol):
    """A file that is open for reading, as `pyarrow.NativeFile` is."""

    def read(self, num_bytes: int = -1, /) -> bytes:
        """Return the next bytes, as many as asked for unless the file ends before; -1: all that are left."""
        ...

    def read_at(self, num_bytes: int, offset: int, /) -> bytes:
        """Return the bytes from a position on; pyarrow's local files need a `seek` before the next `read`."""
        ...

    def seek(self, position: int, whence: int = 0, /) -> int:
        """Change the position at which `read` goes on, and return it."""
        ...

    def seekable(self) -> bool:
        """Return whether the position can be changed."""
        ...

    def tell(self) -> int:
        """Return the position at which `read` goes on."""
        ...

    def size(self) -> int:
        """Return the number of bytes in the file."""
        ...

    def close(self) -> None:
        """Close the file."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None, /
    ) -> None: ...


def is_local(filesystem: fs.FileSystem) -> bool:
    """Return whether a filesystem is the machine's own, which is read directly."""
    return isinstance(filesystem, fs.LocalFileSystem)


def open_for_reading(filesystem: fs.FileSystem, path: str, *, stop: int | None = None) -> InputFile:
    """Open a file that is read from front to back, or piece by piece; a remote one is read ahead in large ranges.

    Args:
        filesystem: filesystem of the file.
        path: path within it.
        stop: position up to which the file will be read, if that is not its end. Bytes behind it can be read, but they
            are not read ahead.

    Raises:
        OSError: if the file cannot be opened; for an object store the message names the URI and what to set.
    """
    if is_local(filesystem):
        file: InputFile = filesystem.open_input_file(path)
        return file
    return RemoteFile(RemoteObject(filesystem, path), stop=stop)


def version_of(filesystem: fs.FileSystem, path: str) -> str:
    """Return what changes when a file is written again: size and time of modification, of an object its ETag."""
    if not is_local(filesystem):
        return RemoteObject(filesystem, path).key
    info = filesystem.get_file_info(path)
    return f"{info.size}-{info.mtime_ns}"


@contextmanager
def unchanged(filesystem: fs.FileSystem, path: str) -> Iterator[str]:
    """Yield the version of a file that is read in the block, and check at the end that it is still the same.

    Raises:
        OSError: if the file was written again, so that bytes of both versions may have been read.
    """
    version = version_of(filesystem, path)
    yield version
    if version_of(filesystem, path) != version:
        raise OSError(f"{path} was written again while it was read: start again when it is complete")


def name_object(filesystem: fs.FileSystem, path: str) -> str:
    """Return a name of 24 letters and digits for an object, which all its versions share; nothing is requested for it."""
    store = [getattr(filesystem, "region", ""), *(environ.get(name, "") for name in _ENDPOINT_VARIABLES)]
    return blake2b(repr((store, _uri(filesystem, path))).encode(), digest_size=12).hexdigest()


def _uri(filesystem: fs.FileSystem, path: str) -> str:
    scheme = {"gcs": "gs"}.get(filesystem.type_name, filesystem.type_name)
    return f"{scheme}://{path}"


class RemoteObject:
    """An object of a remote filesystem, of which any range can be read by several threads at the same time.

    Raises:
        OSError: if the object cannot be opened; the message names the URI and what to set.
    """

    def __init__(self, filesystem: fs.FileSystem, path: str) -> None:
        self.uri = _uri(filesystem, path)
        self._file: pa.NativeFile = self._persist(lambda: filesystem.open_input_file(path))
        self.size: int = self._file.size()
        """Size of the object in bytes."""
        version = repr((self.size, self._version(filesystem, path), BLOCK_BYTES)).encode()
        self.key = f"{name_object(filesystem, path)}-{blake2b(version, digest_size=12).hexdigest()}"
        """Name for the content of the object, which another version of it does not have; it begins with `name_object`."""

    @property
    def num_blocks(self) -> int:
        """Number of blocks of the object."""
        return max(1, self.size // BLOCK_BYTES)

    def block_at(self, position: int) -> int:
        """Return the number of the block that holds a position."""
        return min(position // BLOCK_BYTES, self.num_blocks - 1)

    def bounds(self, block: int) -> tuple[int, int]:
        """Return the positions at which a block begins and ends."""
        return block * BLOCK_BYTES, self.size if block == self.num_blocks - 1 else (block + 1) * BLOCK_BYTES

    def read(self, offset: int, num_bytes: int) -> bytes:
        """Return the bytes from a position on in one request; they are fewer than asked for where the object ends.

        Raises:
            OSError: if the store refuses, or fails several times; the message names the URI and what to set.
        """
        num_bytes = max(0, min(num_bytes, self.size - offset))
        if not num_bytes:
            return b""

        def get() -> bytes:
            data: bytes = self._file.read_at(num_bytes, offset)
            if len(data) < num_bytes:
                raise OSError(f"the answer ends after {len(data)} of {num_bytes} bytes from byte {offset} on")
            return data

        data = self._persist(get)
        TRAFFIC.add(num_gets=1, num_bytes=num_bytes)
        return data

    def _persist(self, call: Callable[[], Result]) -> Result:
        """Return what a call returns, repeating it after pauses that double, with jitter, as long as it may help."""
        for attempt in range(_NUM_ATTEMPTS):
            try:
                return call()
            except OSError as error:
                if is_final(error) or attempt == _NUM_ATTEMPTS - 1:
                    raise explain(error, self.uri) from error
                RETRIES.add()
                time.sleep(min(_FIRST_PAUSE * 2**attempt, _LONGEST_PAUSE) * _jitter.uniform(0.5, 1.0))
        raise AssertionError

    def _version(self, filesystem: fs.FileSystem, path: str) -> str:
        """Return what changes when the object is written again: its ETag, or else its time of modification."""
        try:
            tag = self._file.metadata().get("ETag", b"")
        except (NotImplementedError, pa.ArrowException, OSError):
            tag = b""
        return tag.decode() or str(self._persist(lambda: filesystem.get_file_info(path).mtime_ns))


class RemoteFile(io.RawIOBase):
    """A remote object as a file that is read ahead, once it has been read beyond a block.

    It holds at most four blocks in memory, and is not for several threads.
    """

    def __init__(self, remote: RemoteObject, *, stop: int | None = None) -> None:
        super().__init__()
        self._remote = remote
        self._stop = remote.size if stop is None else min(stop, remote.size)
        self._position = 0
        # The next ranges, without gaps: where each begins and ends, and its bytes, which may still be on their way.
        self._ranges: deque[tuple[int, int, Future[bytes]]] = deque()
        self._pool = ThreadPoolExecutor(_NUM_BLOCKS_AHEAD, thread_name_prefix="read-ahead")

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def size(self) -> int:
        """Return the number of bytes in the object."""
        return self._remote.size

    def tell(self) -> int:
        """Return the position at which `read` goes on."""
        return self._position

    def seek(self, position: int, whence: int = io.SEEK_SET, /) -> int:
        """Change the position at which `read` goes on, and return it."""
        self._position = max(0, position + {0: 0, 1: self._position, 2: self._remote.size}[whence])
        return self._position

    def read_at(self, num_bytes: int, offset: int, /) -> bytes:
        """Return the bytes from a position on in one request, unless they lie in memory."""
        for begin, end, future in self._ranges:
            if begin <= offset and offset + num_bytes <= end and future.done():
                return future.result()[offset - begin : offset - begin + num_bytes]
        return self._remote.read(offset, num_bytes)

    def read(self, num_bytes: int | None = -1, /) -> bytes:
        """Return the next bytes, as many as asked for unless the object ends before; -1: all that are left.

        Raises:
            OSError: if the store refuses, or fails several times; the message names the URI and what to set.
        """
        num_left = self._remote.size - self._position
        if num_bytes is not None and num_bytes >= 0:
            num_left = min(num_bytes, num_left)
        parts = []
        while num_left > 0:
            begin, data = self._range_here()
            part = data[self._position - begin : self._position - begin + num_left]
            parts.append(part)
            self._position += len(part)
            num_left -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def readinto(self, buffer: memoryview, /) -> int:  # type: ignore[override]  # typeshed's type of a buffer is private
        """Read into a buffer, as wrappers of the standard library do, and return the number of bytes."""
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        """Stop reading ahead and free the memory."""
        if not self.closed:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._ranges.clear()
        super().close()

    def _range_here(self) -> tuple[int, bytes]:
        """Return the range that holds the current position: where it begins, and its bytes."""
        is_next = bool(self._ranges) and self._position == self._ranges[0][1]
        while self._ranges and not self._ranges[0][0] <= self._position < self._ranges[0][1]:
            self._ranges.popleft()
        if not self._ranges:
            self._request(self._position)
        while (is_next or len(self._ranges) > 1) and len(self._ranges) <= _NUM_BLOCKS_AHEAD:
            if self._ranges[-1][1] >= self._stop:
                break
            self._request(self._ranges[-1][1])
        begin, _, future = self._ranges[0]
        return begin, future.result()

    def _request(self, begin: int) -> None:
        """Request the range from a position to the end of its block, or of the next one if that is near."""
        limit = self._stop if begin < self._stop else self._remote.size
        # What is left is divided evenly, so that every range has at least a block's size where there is so much.
        num_ranges = max(1, (limit - begin) // BLOCK_BYTES)
        end = limit if num_ranges == 1 else begin + BLOCK_BYTES
        self._ranges.append((begin, end, self._pool.submit(self._remote.read, begin, end - begin)))
