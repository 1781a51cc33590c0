"""Failures of a run, and how it goes on: a full or lost disk, a store that refuses to be written. Nothing here needs Ray."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pyarrow.fs import FileSystem, LocalFileSystem

from jobs.engine.resumption import find_resumption
from pipelines.store_errors import RefusedWriteError, explain_write

# What stays so however often it is tried: no room is left, or the storage has become read-only or unreachable.
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_NO_STORAGE = {errno.EROFS, errno.ESTALE, errno.ENOTCONN, errno.EHOSTDOWN}
_FROM_THE_LAST = "the same command then goes on from the last checkpoint"
# What says so only of a file that is written.
_GONE = {errno.ENOTDIR, errno.ENODEV}


class FatalTrainingError(RuntimeError):
    """The run has failed, and restarting its workers would not help; the message says how to continue it, if it can be."""

    def __init__(self, message: str, cause: str = "") -> None:
        super().__init__(message)
        self.cause = cause or message


class DiskFullError(OSError):
    """A file cannot be written: the disk is full, a quota is reached, or the storage is read-only or away."""


@contextmanager
def naming_full_disk(path: Path | str) -> Iterator[None]:
    """Convert every error of a full disk, or of a storage that lets nothing be written, into one that names the path."""
    try:
        yield
    except DiskFullError:
        raise
    except Exception as error:
        if number := _no_room_number(error) or (isinstance(error, OSError) and error.errno in _GONE and error.errno):
            raise DiskFullError(number, os.strerror(number), str(path)) from error
        raise


def _no_room_number(error: BaseException | None) -> int:
    """Return the operating system's error number if an error was caused by a full or lost disk, else 0."""
    while error is not None:
        if isinstance(error, DiskFullError) or (isinstance(error, OSError) and error.errno in _NO_ROOM | _NO_STORAGE):
            return error.errno or 0
        for number in _NO_ROOM | _NO_STORAGE:
            if f"(os error {number})" in str(error):  # format of safetensors, which is written in Rust
                return number
        error = error.__cause__ or error.__context__  # torch raises another error while it handles the original one
    return 0


@contextmanager
def naming_refused_write(filesystem: FileSystem, path: str) -> Iterator[None]:
    """Convert the error of an object store that lets nothing be written inside the block."""
    try:
        yield
    except OSError as error:
        if isinstance(filesystem, LocalFileSystem):
            raise
        explained = explain_write(error, f"{filesystem.type_name}://{path}")
        if isinstance(explained, RefusedWriteError):
            raise explained from error
        raise


def explain_storage(failures: Iterable[BaseException], directory: str) -> str:
    """Say which file or URI cannot be written and how to continue; empty if that is not why a run failed."""
    for failure in failures:
        if number := _no_room_number(failure):
            reason = f"{os.strerror(number)}: {getattr(failure, 'filename', None) or directory}"
            remedy = "make room there" if number in _NO_ROOM else "see that it can be written again"
        else:
            cause: BaseException | None = failure
            while cause is not None and not isinstance(cause, RefusedWriteError):
                cause = cause.__cause__ or cause.__context__
            if cause is None:
                continue
            reason, remedy = str(cause), "see to that"
        is_there = not number or number in _NO_ROOM | {errno.EROFS}
        return f"{reason}. To continue, {remedy}: {describe_continuation(directory) if is_there else _FROM_THE_LAST}"
    return ""


def describe_continuation(directory: str) -> str:
    """Say from where the run in a directory goes on if its command is typed again."""
    with suppress(OSError, ValueError):  # the store may be lost, or no checkpoint be whole: the next start says so
        if not (step := find_resumption(directory, {}).step):
            return "the same command then begins again at step 0"
        return f"the same command then goes on from the checkpoint of step {step}, which is whole"
    return _FROM_THE_LAST
