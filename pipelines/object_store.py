"""Read objects of a remote filesystem (S3, GCS, HDFS, …) in large ranges, and ask again where the store fails.

An object store answers a request after tens of milliseconds and bills each one, so an object is read in ranges of 8 MiB
(`BLOCK_BYTES`) and more, several at a time, wherever it has so many bytes.
"""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from hashlib import blake2b
from os import environ
from typing import Self, TypeAlias, TypeVar

import pyarrow as pa
from pyarrow import fs

from pipelines.store_errors import explain, persist

Result = TypeVar("Result")
InputFile: TypeAlias = "pa.NativeFile | RemoteFile"
"""A file that is open for reading; pyarrow's local files need a `seek` between `read_at` and `read`."""

BLOCK_BYTES = 2**23
"""Size of a block, the unit in which objects are read. The last block of an object has the rest too, up to twice that."""

_NUM_BLOCKS_AHEAD = 3
_ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "STORAGE_EMULATOR_HOST")


def is_local(filesystem: fs.FileSystem) -> bool:
    """Return whether a filesystem is the machine's own, which is read directly."""
    return isinstance(filesystem, fs.LocalFileSystem)


def open_for_reading(filesystem: fs.FileSystem, path: str, *, stop: int | None = None) -> InputFile:
    """Open a file that is read from front to back, or piece by piece; a remote one is read ahead up to `stop`."""
    if is_local(filesystem):
        return filesystem.open_input_file(path)
    return RemoteFile(RemoteObject(filesystem, path), stop=stop)


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


class RemoteFile:
    """A remote object as a file that is read ahead, once it has been read beyond a block.

    It has the methods of a `pyarrow.NativeFile` that readers here use, holds at most four blocks in memory, and is not for
    several threads.
    """

    def __init__(self, remote: RemoteObject, *, stop: int | None = None) -> None:
        self._remote = remote
        self._stop = remote.size if stop is None else min(stop, remote.size)
        self._position = 0
        # The next ranges, without gaps: where each begins and ends, and its bytes, which may still be on their way.
        self._ranges: deque[tuple[int, int, Future[bytes]]] = deque()
        self._pool = ThreadPoolExecutor(_NUM_BLOCKS_AHEAD, thread_name_prefix="read-ahead")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._ranges.clear()

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the position at which `read` goes on."""
        return self._position

    def seek(self, position: int, whence: int = io.SEEK_SET, /) -> int:
        """Change the position at which `read` goes on, and return it."""
        self._position = max(0, position + {0: 0, 1: self._position, 2: self._remote.size}[whence])
        return self._position

    def read(self, num_bytes: int = -1, /) -> bytes:
        """Return the next bytes, as many as asked for unless the object ends before; -1: all that are left."""
        num_left = self._remote.size - self._position
        if num_bytes >= 0:
            num_left = min(num_bytes, num_left)
        parts = []
        while num_left > 0:
            begin, data = self._range_here()
            part = data[self._position - begin : self._position - begin + num_left]
            parts.append(part)
            self._position += len(part)
            num_left -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

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
