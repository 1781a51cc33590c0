"""Keep blocks of remote files on the node's own disk, in a directory that all processes of the node share.

The directory is $TEMPNET_CACHE, or `tempnet-cache-<user id>` in the system's directory of temporary files. Every block
is a file that never changes once it has its name. The name begins with that of the object that the block is part of,
and a hyphen. The file's time of modification says when it was last used, and its last four bytes are a checksum of the
others. Reading a block that is there needs no lock. There are two kinds of locks, which the kernel frees with their process:

- A block that is being fetched has the suffix `.partial` and is locked by whoever fetches it. The file is empty until room
  is reserved for the block, and from then on as large as the block will be. Whoever needs the room, or the block, takes a
  partial file without a lock.
- `.lock` is locked by whoever reserves room, removes blocks or gives one its name. Without it, a thread that lists the
  directory to see what room is left could miss a block that is renamed meanwhile.
"""

from __future__ import annotations

import errno
import fcntl
import os
import tempfile
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
_FULL = (errno.ENOSPC, errno.EDQUOT)


class BlockCache:
    """A directory of blocks that never holds more than `max_bytes`; those not used for longest make room for others.

    A block of the window that is being read (`now`) makes no room: samples come in random order, so that every block of it
    is as likely to be read next as any other. A block that is fetched ahead does not replace those of `near` either.

    The limit holds at every moment for all files in the directory together, with the room that is reserved for blocks that
    are being fetched. If processes have different limits, the largest of them holds.
    """

    def __init__(self, directory: Path, max_bytes: int) -> None:
        self.directory, self.max_bytes = directory, max_bytes
        self.now, self.near = frozenset[str](), frozenset[str]()
        """Names of the objects of the window that this process reads, and of those before and after it; set at any time."""
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if directory.stat().st_uid != os.getuid():
            raise PermissionError(
                f"{directory} belongs to another user: set {DIRECTORY_VARIABLE} to a directory of your own on this node"
            )
        # Names and inodes of the blocks that this process has written or checked, so that it checks each of them once.
        self._intact: set[tuple[str, int]] = set()

    def open(self, name: str, num_bytes: int, fetch: Callable[[], bytes]) -> BinaryIO | None:
        """Open a block for reading; if the cache does not hold it, it is fetched first, or waited for.

        `fetch` returns the bytes that `name` stands for, at most `num_bytes`; its exceptions pass through. The file has four
        bytes more, and stays readable if the block is removed meanwhile. None is returned if the disk or the cache has no
        room for the block, which is then not fetched.
        """
        while True:
            if file := self._find(name):
                return file
            if partial := self._claim(name, waits=True):
                with partial:
                    return self._find(name) if self._fill(partial, name, num_bytes, fetch, self.now) else None

    def fetch(self, name: str, num_bytes: int, fetch: Callable[[], bytes]) -> bool:
        """Fetch a block ahead, unless it is there or somebody else is fetching it; return False if there is no room."""
        if partial := self._claim(name, waits=False):
            with partial:
                return self._fill(partial, name, num_bytes, fetch, self.now | self.near)
        return True

    def _path(self, name: str) -> Path:
        return self.directory / name

    def _find(self, name: str) -> BinaryIO | None:
        """Open a block that is there and intact, and note that it is used now; a damaged one is removed."""
        try:
            file = self._path(name).open("rb", buffering=0)
        except FileNotFoundError:
            return None
        known = name, os.fstat(file.fileno()).st_ino
        if known not in self._intact:
            content = memoryview(file.read())
            if zlib.crc32(content[:-_CHECKSUM_BYTES]).to_bytes(_CHECKSUM_BYTES, "little") != content[-_CHECKSUM_BYTES:]:
                with file, self._lock():
                    if has_path(file, self._path(name)):  # Otherwise another thread has removed it already.
                        self._path(name).unlink()
                return None
            file.seek(0)
            self._intact.add(known)
        os.utime(file.fileno())
        return file

    def _claim(self, name: str, *, waits: bool) -> BinaryIO | None:
        """Open and lock the partial file of a block; None if the block is there, or somebody else has or had the file."""
        if self._path(name).exists():
            return None
        if partial := open_locked(self._path(name + _PARTIAL), os.O_CREAT, waits=waits):
            os.ftruncate(partial.fileno(), 0)  # A process that died may have left what it had reserved.
        return partial

    def _fill(
        self, partial: BinaryIO, name: str, num_bytes: int, fetch: Callable[[], bytes], kept: frozenset[str]
    ) -> bool:
        """Fetch a block into its locked partial file and give it its name, unless there is no room; free the lock."""
        path = self._path(name + _PARTIAL)
        try:
            if self._path(name).exists():
                return True
            if not self._reserve(partial, num_bytes + _CHECKSUM_BYTES, kept):
                return False
            content = fetch()
            assert len(content) <= num_bytes
            os.ftruncate(partial.fileno(), len(content) + _CHECKSUM_BYTES)
            with path.open("r+b") as file:
                file.write(content)
                file.write(zlib.crc32(content).to_bytes(_CHECKSUM_BYTES, "little"))
            with self._lock():
                path.rename(self._path(name))
            self._intact.add((name, os.fstat(partial.fileno()).st_ino))
            return True
        except OSError as error:
            if error.errno in _FULL:
                return False
            raise
        finally:
            if has_path(partial, path):
                path.unlink()
            unlock(partial)

    def _reserve(self, partial: BinaryIO, num_bytes: int, kept: frozenset[str]) -> bool:
        """Let an empty partial file have its size, if blocks of objects that are not `kept` leave room for it."""
        with self._lock():
            blocks = []  # time of the last use in ns, size and path of all, partial ones included
            for path in self.directory.iterdir():
                with suppress(FileNotFoundError):
                    status = path.stat()
                    blocks += [(status.st_mtime_ns, status.st_size, path)] if path.name != _LOCK else []
            excess = sum(size for _, size, _ in blocks) + num_bytes - self.max_bytes
            if excess > 0:
                complete = []
                for time, size, path in blocks:
                    if path.suffix == _PARTIAL:  # It is removed, unless somebody is fetching the block.
                        if file := open_locked(path, 0, waits=False):
                            with file:
                                path.unlink()
                            excess -= size
                    elif path.name.partition("-")[0] not in kept:
                        complete.append((time, size, path))
                if excess > sum(size for _, size, _ in complete):
                    return False
                for _, size, path in sorted(complete):
                    if excess <= 0:
                        break
                    path.unlink(missing_ok=True)
                    excess -= size
            # This is quicker than `posix_fallocate`; a disk that is full is noticed while the block is written.
            os.ftruncate(partial.fileno(), num_bytes)
            return True

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """Let only one thread of the node reserve room, remove blocks or give one its name at a time."""
        with (self.directory / _LOCK).open("wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            try:
                yield
            finally:
                unlock(file)


def node_directory() -> Path:
    """Return the directory of the node's cache."""
    return Path(os.environ.get(DIRECTORY_VARIABLE) or f"{tempfile.gettempdir()}/tempnet-cache-{os.getuid()}")


def open_locked(path: Path, flags: int, *, waits: bool) -> BinaryIO | None:
    """Open a file and lock it against all others that lock it; the kernel frees the lock when the process dies.

    `flags` are further flags of `os.open`. None is returned if the file is missing or (unless `waits`) locked by another, or
    was removed or renamed before it was locked.
    """
    try:
        file = os.fdopen(os.open(path, os.O_RDWR | os.O_CLOEXEC | flags, 0o600), "r+b", buffering=0)
    except FileNotFoundError:
        return None
    with suppress(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
        if has_path(file, path):
            return file
    file.close()
    return None


def unlock(file: BinaryIO) -> None:
    """Free the lock of a file before it is closed: a child that was forked meanwhile has it open and would keep the lock."""
    fcntl.flock(file, fcntl.LOCK_UN)


def has_path(file: BinaryIO, path: Path) -> bool:
    """Return whether a file that is open still has a path: it may have been removed, renamed or replaced."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
