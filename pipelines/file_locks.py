"""Lock files between the threads and processes of a node."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO


def open_locked(path: Path, flags: int, *, waits: bool) -> BinaryIO | None:
    """Open a file and lock it against all others that lock it; the kernel frees the lock when the process dies.

    Args:
        path: path of the file.
        flags: further flags of `os.open`, such as `os.O_CREAT`.
        waits: whether to wait while another has locked the file.

    Returns:
        The file, open for reading and writing, or None if it is missing or locked by another, or was removed or renamed
        before it was locked.
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
