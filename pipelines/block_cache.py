"""Keep blocks of remote files on the node's own disk, in a directory that all processes of the node share.

The directory is $TEMPNET_CACHE, or `tempnet-cache-<user id>` in the system's directory of temporary files. Every block
is a file that never changes once it has its name. Its time of modification says when it was last used, and its last four
bytes are a checksum of the others. A block that is being fetched has the suffix `.partial` and is locked by whoever
fetches it; the kernel releases the lock if that process dies.
"""

from __future__ import annotations

import errno
import fcntl
import os
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

DIRECTORY_VARIABLE = "TEMPNET_CACHE"
"""Environment variable that names the directory of the node's cache."""

_PARTIAL = ".partial"
_LOCK = ".lock"
_CHECKSUM_BYTES = 4
_READ_BYTES = 2**20
_NUM_CHECKED = 2**16
# Partial blocks of processes that died are removed when they are as old as this.
_SECONDS_OF_A_FETCH = 3600.0
_FULL = (errno.ENOSPC, errno.EDQUOT)


class BlockCache:
    """A directory of blocks that never holds more than `max_bytes`; the least recently used ones make room.

    Args:
        directory: the directory, which is created if it is missing.
        max_bytes: largest size of all blocks together. Every process removes blocks only to stay below its own limit.

    Raises:
        OSError: if the directory cannot be created, or belongs to another user.
    """

    def __init__(self, directory: Path, max_bytes: int) -> None:
        self.directory, self.max_bytes = directory, max_bytes
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if directory.stat().st_uid != os.getuid():
            raise PermissionError(
                f"{directory} belongs to another user: set {DIRECTORY_VARIABLE} to a directory of your own on this node"
            )
        # Names and inodes of the blocks that this process has written or checked, so that it checks each of them once.
        self._intact: set[tuple[str, int, int]] = set()

    def open(self, name: str, fetch: Callable[[], bytes]) -> BinaryIO | None:
        """Open a block for reading; if the cache does not hold it, it is fetched first.

        If another thread or process is fetching the block, it is waited for. The file stays readable if the block is
        removed meanwhile. After the block's bytes it has four bytes more.

        Args:
            name: name of the block, which is a file name and stands for its content.
            fetch: function that returns the bytes of the block; its exceptions pass through.

        Returns:
            The file, or None if the disk or the cache has no room for the block.
        """
        while True:
            if file := self._find(name):
                return file
            if (partial := self._claim(name, waits=True)) is None:
                continue
            with partial:
                return self._find(name) if self._fill(partial, name, fetch) else None

    def fetch(self, name: str, fetch: Callable[[], bytes]) -> None:
        """Fetch a block unless the cache holds it already, or somebody else is fetching it."""
        if self._path(name).exists():
            return
        if partial := self._claim(name, waits=False):
            with partial:
                self._fill(partial, name, fetch)

    def holds(self, name: str) -> bool:
        """Return whether the cache holds a block; what it holds may be damaged."""
        return self._path(name).exists()

    def num_bytes(self) -> int:
        """Return the size of all blocks, including those that are being fetched, in bytes."""
        with self._lock():  # Otherwise a block that makes room meanwhile would count beside the one that replaces it.
            return sum(size for _, size, _ in self._blocks())

    def _path(self, name: str) -> Path:
        return self.directory / name

    def _find(self, name: str) -> BinaryIO | None:
        """Open a block that is there and intact, and note that it is used now; a damaged one is removed."""
        try:
            file = self._path(name).open("rb", buffering=0)
        except FileNotFoundError:
            return None
        status = os.fstat(file.fileno())
        known = name, status.st_ino, status.st_size
        if known not in self._intact:
            if not _is_intact(file, status.st_size):
                file.close()
                self._path(name).unlink(missing_ok=True)
                return None
            self._note_intact(known)
        os.utime(file.fileno())
        return file

    def _claim(self, name: str, *, waits: bool) -> BinaryIO | None:
        """Open and lock the partial file of a block, or return None if the block is there or somebody else's."""
        partial = self._path(name + _PARTIAL)
        while not self._path(name).exists():
            file = os.fdopen(os.open(partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+b", buffering=0)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
                # While this waited, the file may have become the block, or may have been removed.
                if os.fstat(file.fileno()).st_ino == partial.stat().st_ino:
                    return file
            except BlockingIOError:
                file.close()
                return None
            except FileNotFoundError:
                pass
            file.close()
        return None

    def _fill(self, partial: BinaryIO, name: str, fetch: Callable[[], bytes]) -> bool:
        """Write a block into its locked partial file and give it its name, unless there is no room for it."""
        path = self._path(name + _PARTIAL)
        try:
            if self._path(name).exists():
                path.unlink(missing_ok=True)
                return True
            content = fetch()
            with self._lock():
                has_room = self._make_room(partial, len(content) + _CHECKSUM_BYTES)
            if has_room:
                partial.seek(0)
                _write(partial, content)
                _write(partial, zlib.crc32(content).to_bytes(_CHECKSUM_BYTES, "little"))
                path.rename(self._path(name))
                self._note_intact((name, os.fstat(partial.fileno()).st_ino, len(content) + _CHECKSUM_BYTES))
                return True
        except BaseException as error:
            path.unlink(missing_ok=True)
            if isinstance(error, OSError) and error.errno in _FULL:
                return False
            raise
        path.unlink(missing_ok=True)
        return False

    def _make_room(self, partial: BinaryIO, num_bytes: int) -> bool:
        """Remove the blocks that were not used for longest until `num_bytes` more fit, and reserve them."""
        blocks = sorted(self._blocks())
        used = sum(size for _, size, _ in blocks)
        for modified, size, path in blocks:
            if used + num_bytes <= self.max_bytes:
                break
            if path.suffix == _PARTIAL and time.time() - modified / 1e9 < _SECONDS_OF_A_FETCH:
                continue
            path.unlink(missing_ok=True)
            used -= size
        if used + num_bytes > self.max_bytes:
            return False
        # This is quicker than `posix_fallocate`; a disk that is full is noticed while the block is written.
        os.ftruncate(partial.fileno(), num_bytes)
        return True

    def _blocks(self) -> Iterator[tuple[int, int, Path]]:
        """Yield the time of the last use in ns, the size and the path of all blocks, partial ones included."""
        inodes: set[int] = set()  # A block that is renamed meanwhile may be listed under both names.
        with os.scandir(self.directory) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    status = entry.stat()
                    if entry.name != _LOCK and status.st_ino not in inodes:
                        inodes.add(status.st_ino)
                        yield status.st_mtime_ns, status.st_size, Path(entry.path)

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """Let only one thread of the node make room at a time."""
        with (self.directory / _LOCK).open("wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _note_intact(self, known: tuple[str, int, int]) -> None:
        if len(self._intact) >= _NUM_CHECKED:
            self._intact.clear()
        self._intact.add(known)


def node_directory() -> Path:
    """Return the directory of the node's cache."""
    return Path(os.environ.get(DIRECTORY_VARIABLE) or f"{tempfile.gettempdir()}/tempnet-cache-{os.getuid()}")


def _is_intact(file: BinaryIO, size: int) -> bool:
    """Return whether a block of `size` bytes has the checksum at its end; the file is at its beginning before and after."""
    checksum, num_left = 0, size - _CHECKSUM_BYTES
    while num_left > 0 and (part := file.read(min(num_left, _READ_BYTES))):
        checksum = zlib.crc32(part, checksum)
        num_left -= len(part)
    is_intact = num_left == 0 and file.read() == checksum.to_bytes(_CHECKSUM_BYTES, "little")
    file.seek(0)
    return is_intact


def _write(file: BinaryIO, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[file.write(view) :]
