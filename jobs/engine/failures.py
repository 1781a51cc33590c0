"""What Ray Train's controller does for a run: notes and keeps checkpoints, restarts workers, and explains their failures.

This module does not import torch, which the controller does not need.
"""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pyarrow.fs import FileSystem, LocalFileSystem
from ray.actor import ActorHandle
from ray.exceptions import RayTaskError
from ray.train import Checkpoint, FailureConfig, UserCallback
from ray.train.v2.api.exceptions import ControllerError, TrainingFailedError, WorkerGroupError

from jobs.engine.masking import masked
from jobs.engine.progress import note_failure
from jobs.engine.ray_private import (
    DefaultFailurePolicy,
    FailureDecision,
    WorkerGroupStartupFailedError,
    WorkerGroupStartupTimeoutError,
    WorkerHealthCheckFailedError,
)
from jobs.engine.resumption import find_resumption, record_checkpoint, registered_step
from pipelines.store_errors import RefusedWriteError, explain_write, is_store

# What stays so however often it is tried: no room is left, or the storage has become read-only or unreachable.
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_NO_STORAGE = {errno.EROFS, errno.ESTALE, errno.ENOTCONN, errno.EHOSTDOWN}
_MAX_CHARACTERS = 300
_NOT_STARTED = (WorkerGroupStartupFailedError, WorkerGroupStartupTimeoutError)


class DiskFullError(OSError):
    """A file cannot be written: the disk is full, a quota is reached, or the storage is read-only or away."""


@contextmanager
def naming_full_disk(path: Path | str) -> Iterator[None]:
    """Convert every error of a full disk, or of a storage that lets nothing be written, into one that names the path.

    Raises:
        DiskFullError: with the operating system's error number; any other error is raised unchanged.
    """
    try:
        yield
    except DiskFullError:
        raise
    except Exception as error:
        if number := _no_room_number(error):
            raise DiskFullError(number, os.strerror(number), str(path)) from error
        raise


def _no_room_number(error: BaseException | None) -> int:
    """Return the operating system's error number if an error was caused by a full or lost disk, else 0."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _NO_ROOM | _NO_STORAGE:
            return error.errno
        for number in _NO_ROOM | _NO_STORAGE:
            if f"(os error {number})" in str(error):  # format of safetensors, which is written in Rust
                return number
        error = error.__cause__ or error.__context__  # torch raises another error while it handles the original one
    return 0


def find_full_disk(error: TrainingFailedError, directory: str) -> str:
    """Describe in one line which file could not be written because a disk is full.

    Args:
        error: why the run failed.
        directory: path or URI of the run, where Ray Train's controller writes.

    Returns:
        The line; empty if a full disk is not why the run failed.
    """
    for failure in _failures(error):
        if number := _no_room_number(failure):
            return f"{os.strerror(number)}: {getattr(failure, 'filename', None) or directory}"
    return ""


@contextmanager
def naming_refused_write(filesystem: FileSystem, path: str) -> Iterator[None]:
    """Convert the error of an object store that lets nothing be written inside the block.

    Raises:
        RefusedWriteError: with the URI and what to do; any other error is raised unchanged.
    """
    try:
        yield
    except OSError as error:
        if isinstance(filesystem, LocalFileSystem):
            raise
        explained = explain_write(error, f"{filesystem.type_name}://{path}")
        if isinstance(explained, RefusedWriteError):
            raise explained from error
        raise


def find_refused_write(error: TrainingFailedError, directory: str) -> str:
    """Describe in one line which URI the object store does not let be written.

    Args:
        error: why the run failed.
        directory: path or URI of the run, where Ray Train's controller writes.

    Returns:
        The line; empty if that is not why the run failed.
    """
    for failure in _failures(error):
        cause: BaseException | None = failure
        while cause is not None and not isinstance(cause, RefusedWriteError):
            cause = cause.__cause__ or cause.__context__
        if (
            cause is None
            and isinstance(error, ControllerError)
            and isinstance(failure, OSError)
            and is_store(directory)
        ):
            cause = explain_write(failure, directory)
        if isinstance(cause, RefusedWriteError):
            return str(cause)
    return ""


def _failures(error: TrainingFailedError) -> list[Exception]:
    if isinstance(error, WorkerGroupError):
        return list(error.worker_failures.values())
    return [error.controller_failure] if isinstance(error, ControllerError) else []


def describe_continuation(directory: str) -> str:
    """Say from where the run in a directory goes on if its command is typed again."""
    with suppress(OSError, ValueError):  # the store may be lost, or no checkpoint be whole: the next start says so
        if not (step := find_resumption(directory, {}).step):
            return "the same command then begins again at step 0"
        return f"the same command then goes on from the checkpoint of step {step}, which is whole"
    return "the same command then goes on from the last checkpoint"


def explain_end(error: TrainingFailedError, directory: str, *, max_wait_minutes: float) -> str:
    """Explain why :class:`RestartPolicy` did not restart the workers, and how to continue the run.

    Args:
        error: why the run failed.
        directory: path or URI of the run.
        max_wait_minutes: how long the run was to wait for machines.

    Returns:
        The explanation; empty if the decision was that of Ray Train's own policy.
    """
    if full := find_full_disk(error, directory):
        is_away = any(full.startswith(os.strerror(number)) for number in _NO_STORAGE)
        remedy = "see that it can be written again" if is_away else "make room there"
        reason = full
    elif refused := find_refused_write(error, directory):
        remedy = "see to that"
        reason = refused
    elif isinstance(error, ControllerError) and isinstance(error.controller_failure, _NOT_STARTED):
        reason = f"{_describe_wait(error.controller_failure)} within run.max_wait_minutes = {max_wait_minutes:g}"
        remedy = "add machines"
    else:
        return ""
    return f"{reason}. To continue, {remedy}: {describe_continuation(directory)}"


def describe_failure(error: TrainingFailedError) -> str:
    """Describe in one line why a group of workers failed.

    If workers died, only these are named, and not the others that failed because of them.
    """
    if not isinstance(error, WorkerGroupError):
        return _first_line(error.controller_failure if isinstance(error, ControllerError) else error)
    died = {
        rank: failure.health_check_failure
        for rank, failure in error.worker_failures.items()
        if isinstance(failure, WorkerHealthCheckFailedError)
    }
    told = died or error.worker_failures
    return "; ".join(f"worker {rank}: {_first_line(failure)}" for rank, failure in sorted(told.items()))


def _first_line(error: Any) -> str:
    """Describe an error in one line: for a dead process its machine and what ended it, else the error's first line."""
    if isinstance(error, RayTaskError) and error.cause is not None:
        error = error.cause  # its own text begins with the name of the task
    text = str(error)
    pid, ip = _found(r"pid: (\d+)", text), _found(r"ip: (\S+)", text)
    if "its node has died" in text:
        return f"its node {ip} was lost ({_found(r'actor.s node was (.+)', text) or 'Ray gives no reason'})"
    if "its worker process has died" in text:
        detail = _found(r"Worker exit detail: (.+?\.)(?:\s|$)", text)
        if "connection error" in text:  # Ray knows nothing more specific about a process that is gone
            detail = "killed by a signal, such as 9 from the kernel when memory is short or from kill -9, or it crashed"
        return f"its process {pid} on {ip} died: {detail or 'Ray gives no reason'}"
    lines = text.strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:_MAX_CHARACTERS]


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    return match[1].strip() if match else ""


class RestartPolicy(DefaultFailurePolicy):
    """Ray Train's restart policy, which limits the number of restarts, extended by messages and reasons to give up.

    It does not restart the workers after a disk was full or a store refused to be written, since that stays so, and it
    limits the time spent waiting for machines.

    Args:
        failure_config: how often workers are restarted.
        directory: path or URI of the run.
        max_wait_minutes: how long to wait, each time, until there is room for all workers.
        mailbox: carries messages to the driver's terminal; None: they go to the controller's log.
    """

    def __init__(
        self, failure_config: FailureConfig, *, directory: str, max_wait_minutes: float, mailbox: ActorHandle | None
    ) -> None:
        super().__init__(failure_config)  # type: ignore[arg-type]  # Ray annotates the class of Train V1
        self._directory = directory
        self._max_wait_seconds = 60.0 * max_wait_minutes
        self._mailbox = mailbox
        self._waiting_since: float | None = None

    def make_decision(self, training_failed_error: TrainingFailedError) -> FailureDecision:
        """Decide whether to restart the workers.

        Ray Train calls this once for every failure, and while there is no room for the workers, once every
        $RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S seconds (by default, every minute).
        """
        error = training_failed_error
        if find_full_disk(error, self._directory) or find_refused_write(error, self._directory):
            return FailureDecision.RAISE
        if isinstance(error, ControllerError) and isinstance(error.controller_failure, _NOT_STARTED):
            return self._wait(error.controller_failure)
        self._waiting_since = None
        num_before = self._worker_group_failures
        decision = super().make_decision(error)
        if decision == FailureDecision.RETRY:
            number = f"{self._worker_group_failures} of {self.failure_config.max_failures}"
            if self._worker_group_failures == num_before:
                number = "that does not count, as a node was taken away"
            cause, step = describe_failure(error), registered_step(self._directory)
            note_failure(self._directory, masked(cause), step=step, is_final=False)
            self._say(f"{cause}; restart {number}, from step {step}")
        return decision

    def _wait(self, failure: Exception) -> FailureDecision:
        if self._waiting_since is None:
            self._waiting_since = time.monotonic() - _start_timeout()
        waited = time.monotonic() - self._waiting_since
        if waited >= self._max_wait_seconds:
            return FailureDecision.RAISE
        self._say(
            f"{_describe_wait(failure)} for {waited / 60:.3g} minutes now; the run waits for at most "
            f"{self._max_wait_seconds / 60:g} (run.max_wait_minutes)"
        )
        return FailureDecision.RETRY

    def _say(self, line: str) -> None:
        if self._mailbox is None:
            print(line, flush=True)
        else:
            self._mailbox.say.remote(line)


def _describe_wait(failure: Exception) -> str:
    if isinstance(failure, WorkerGroupStartupTimeoutError):
        return f"no room for {failure.num_workers} workers, as nodes are lost or busy,"
    return f"the workers could not be started ({_first_line(failure)})"


def _start_timeout() -> float:
    return float(os.environ.get("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "60"))


class CheckpointRecord(UserCallback):
    """Runs in Ray Train's controller; notes every checkpoint when all workers have written it, and deletes old ones."""

    def __init__(self, directory: str, *, num_kept: int) -> None:
        self._directory, self._num_kept = directory, num_kept

    def after_report(self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Checkpoint | None) -> None:
        """Note the checkpoint of a report, if it has one."""
        if checkpoint is not None:
            name = checkpoint.path.rpartition("/")[2]
            rating = metrics[0].get("rating")
            record_checkpoint(self._directory, name, num_kept=self._num_kept, rating=rating)
