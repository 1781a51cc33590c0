"""Read objects of a remote filesystem (S3, GCS, HDFS, …) in large ranges, and ask again where the store fails.

An object store answers a request after tens of milliseconds and bills each one, so an object is read in ranges of 8 MiB
(`BLOCK_BYTES`) and more, several at a time, wherever it has so many bytes.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from hashlib import blake2b
from os import environ
from typing import Any, BinaryIO, NamedTuple, TypeVar

import pyarrow as pa
from pyarrow import fs

from pipelines.store_errors import explain, persist

Result = TypeVar("Result")

BLOCK_BYTES = 2**23
"""Size of a block, the unit in which objects are read. The last block of an object has the rest too, up to twice that."""

_LOCAL_BUFFER_BYTES = 2**16
_ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "STORAGE_EMULATOR_HOST")


def is_local(filesystem: fs.FileSystem) -> bool:
    """Return whether a filesystem is the machine's own, which is read directly."""
    return isinstance(filesystem, fs.LocalFileSystem)


def open_for_reading(filesystem: fs.FileSystem, path: str, *, stop: int | None = None) -> BinaryIO:
    """Open a file that is read from front to back, or piece by piece; a remote one is read ahead up to `stop`."""
    if is_local(filesystem):
        return open(path, "rb", buffering=_LOCAL_BUFFER_BYTES)
    # One byte more, as a range of lines is read from the byte before it on.
    return io.BufferedReader(_ObjectStream(RemoteObject(filesystem, path), stop), BLOCK_BYTES + 1)


def version_of(filesystem: fs.FileSystem, path: str) -> str:
    """Return what changes when a file is written again: size and time of modification, of an object its ETag."""
    if not is_local(filesystem):
        return RemoteObject(filesystem, path).key
    info = filesystem.get_file_info(path)
    return f"{info.size}-{info.mtime_ns}"


@contextmanager
def unchanged(filesystem: fs.FileSystem, path: str) -> Iterator[str]:
    """Yield the version of a file that is read in the block, and check at the end that it is still the same."""
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


class Block(NamedTuple):
    """Bytes begin … end − 1 of an object, and a name for their content."""

    name: str
    begin: int
    end: int


class RemoteObject:
    """An object of a remote filesystem, of which any range can be read by several threads at the same time."""

    def __init__(self, filesystem: fs.FileSystem, path: str) -> None:
        self.uri = _uri(filesystem, path)
        self._file: pa.NativeFile = self._persist(lambda: filesystem.open_input_file(path))
        self.size: int = self._file.size()
        """Size of the object in bytes."""
        version = repr((self.size, self._version(filesystem, path), BLOCK_BYTES)).encode()
        self.key = f"{name_object(filesystem, path)}-{blake2b(version, digest_size=12).hexdigest()}"
        """Name for the content of the object, which another version of it does not have; it begins with `name_object`."""

    def whole(self) -> Block:
        """Return the whole object as one block."""
        return Block(f"{self.key}-whole", 0, self.size)

    def blocks(self, begin: int, end: int) -> list[Block]:
        """Return the blocks that hold the bytes begin … end − 1, as far as the object has them."""
        end, last = min(end, self.size), max(1, self.size // BLOCK_BYTES) - 1
        numbers = range(min(begin // BLOCK_BYTES, last), min((end - 1) // BLOCK_BYTES, last) + 1) if begin < end else ()
        ends = {last: self.size}
        return [
            Block(f"{self.key}-{number:06d}", number * BLOCK_BYTES, ends.get(number, (number + 1) * BLOCK_BYTES))
            for number in numbers
        ]

    def read(self, offset: int, num_bytes: int) -> bytes:
        """Return the bytes from a position on in one request; they are fewer than asked for where the object ends."""
        num_bytes = max(0, min(num_bytes, self.size - offset))

        def get() -> bytes:
            data: bytes = self._file.read_at(num_bytes, offset)
            if len(data) < num_bytes:
                raise OSError(f"the answer ends after {len(data)} of {num_bytes} bytes from byte {offset} on")
            return data

        return self._persist(get) if num_bytes else b""

    def _persist(self, call: Callable[[], Result]) -> Result:
        try:
            return persist(call)
        except OSError as error:
            raise explain(error, self.uri) from error

    def _version(self, filesystem: fs.FileSystem, path: str) -> str:
        """Return what changes when the object is written again: its ETag, or else its time of modification."""
        try:
            tag = self._file.metadata().get("ETag", b"")
        except (NotImplementedError, pa.ArrowException, OSError):
            tag = b""
        return tag.decode() or str(self._persist(lambda: filesystem.get_file_info(path).mtime_ns))


class _ObjectStream(io.RawIOBase):
    """A remote object as a stream, whose next range is requested ahead where the one before was read on to its end."""

    def __init__(self, remote: RemoteObject, stop: int | None) -> None:
        self._remote = remote
        self._stop = remote.size if stop is None else stop
        self._position = self._end = 0  # where to read on, and where the last range that was read ended
        self._ahead: Future[bytes] | None = None  # the range from `_end` on
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="read-ahead")

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        super().close()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, position: int, whence: int = io.SEEK_SET, /) -> int:
        self._position = max(0, position + {0: 0, 1: self._position, 2: self._remote.size}[whence])
        return self._position

    def readall(self) -> bytes:
        data = self._remote.read(self._position, self._remote.size - self._position)
        self._position += len(data)
        return data

    def readinto(self, buffer: Any, /) -> int:
        begin, is_next = self._position, 0 < self._position == self._end
        size = min(len(buffer), self._stop - begin) if begin < self._stop else len(buffer)
        data = self._ahead.result()[:size] if self._ahead and is_next else self._remote.read(begin, size)
        buffer[: len(data)] = data
        self._position = self._end = begin + len(data)
        size = min(len(buffer), self._stop - self._end)
        self._ahead = self._pool.submit(self._remote.read, self._end, size) if is_next and size > 0 else None
        return len(data)
