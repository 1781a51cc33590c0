"""What Ray says of a run that fails: why its workers ended, whether they are restarted, and that the cluster is lost.

:class:`RestartPolicy` and :class:`CheckpointRecord` run in Ray Train's controller, which does not need torch.

Where the whole head is lost, Ray raises errors of many kinds. Where only the control service is lost, Ray goes on for a
minute, in which the service may come back, and then ends its processes, the driver among them, without any exception.
So a thread looks whether the head answers, and interrupts the run shortly before that.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import ray
from ray.exceptions import (
    NodeDiedError,
    ObjectLostError,
    RayActorError,
    RayError,
    RaySystemError,
    RayTaskError,
    RpcError,
)
from ray.train import Checkpoint, FailureConfig, UserCallback
from ray.train.v2.api.exceptions import ControllerError, TrainingFailedError, WorkerGroupError

from jobs.engine.cluster import answers, starts_own_ray
from jobs.engine.console import note_failure
from jobs.engine.masking import masked
from jobs.engine.ray_private import (
    DefaultFailurePolicy,
    FailureDecision,
    WorkerGroupStartupFailedError,
    WorkerGroupStartupTimeoutError,
    WorkerHealthCheckFailedError,
    is_raylet_lost,
)
from jobs.engine.resumption import (
    FatalTrainingError,
    describe_continuation,
    explain_storage,
    record_checkpoint,
    registered_step,
)
from pipelines.store_errors import explain_write, is_store

_MAX_CHARACTERS = 300
_NOT_STARTED = (WorkerGroupStartupFailedError, WorkerGroupStartupTimeoutError)
_LOST_PROCESS = (NodeDiedError, ObjectLostError, RayActorError, RaySystemError, RpcError)
_SECONDS_BETWEEN_LOOKS = 2.0
_SHARE_OF_PATIENCE, _SHARE_TO_END = 0.75, 0.15  # of the seconds until Ray ends its processes itself


def as_fatal(error: TrainingFailedError, directory: str, *, max_wait_minutes: float) -> FatalTrainingError:
    """Return what a user is told of a run that Ray Train has ended, and how to continue it."""
    cause = explain_end(error, directory, max_wait_minutes=max_wait_minutes)
    if cause:
        return FatalTrainingError(cause)
    # The error holds tracebacks of the workers; what a person needs is the last line.
    cause = describe_failure(error)
    return FatalTrainingError(f"{error}\n{cause}; {describe_continuation(directory)}", cause)


def explain_end(error: TrainingFailedError, directory: str, *, max_wait_minutes: float) -> str:
    """Explain why :class:`RestartPolicy` did not restart the workers, and how to continue the run."""
    if reason := explain_storage(_failures(error, directory), directory):
        return reason
    if isinstance(error, ControllerError) and isinstance(error.controller_failure, _NOT_STARTED):
        reason = f"{_describe_wait(error.controller_failure)} within run.max_wait_minutes = {max_wait_minutes:g}"
        return f"{reason}. To continue, add machines: {describe_continuation(directory)}"
    return ""


def _failures(error: TrainingFailedError, directory: str) -> list[BaseException]:
    """Return what the workers raised, or the controller, which itself writes into the run's directory."""
    if isinstance(error, WorkerGroupError):
        return list(error.worker_failures.values())
    failure = error.controller_failure if isinstance(error, ControllerError) else None
    if isinstance(failure, OSError) and is_store(directory):
        return [explain_write(failure, directory)]
    return [failure] if failure else []


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
    """

    def __init__(self, failure_config: FailureConfig, *, directory: str, max_wait_minutes: float, mailbox: Any) -> None:
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
        if explain_storage(_failures(error, self._directory), self._directory):
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
            timeout = float(os.environ.get("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "60"))
            self._waiting_since = time.monotonic() - timeout
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
            self._mailbox.say(line)


def _describe_wait(failure: Exception) -> str:
    if isinstance(failure, WorkerGroupStartupTimeoutError):
        return f"no room for {failure.num_workers} workers, as nodes are lost or busy,"
    return f"the workers could not be started ({_first_line(failure)})"


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


class LostClusterError(FatalTrainingError):
    """Ray's head, its control service or another process that the run cannot do without is lost."""


@contextmanager
def naming_lost_cluster(directory: str) -> Iterator[None]:
    """Raise :class:`LostClusterError` for what a lost cluster causes inside the block, and for a loss without any error."""
    # So long Ray's processes wait for a control service that is lost before they end themselves.
    seconds = float(os.environ.get("RAY_gcs_rpc_server_reconnect_timeout_s", "60"))  # noqa: SIM112 - Ray's spelling
    with HeadWatch(directory, patience=_SHARE_OF_PATIENCE * seconds, seconds_to_end=_SHARE_TO_END * seconds) as watch:
        try:
            yield
        except BaseException as error:
            watch.close()  # an interruption from here on would hide the error
            message = watch.message or watch.explain(error)
            if not message:
                raise
            raise LostClusterError(message) from error


class HeadWatch:
    """Context manager that interrupts the main thread, as Ctrl-C does, if Ray's head does not answer for some time."""

    def __init__(
        self,
        directory: str,
        *,
        patience: float,
        seconds_to_end: float,
        seconds_between_looks: float = _SECONDS_BETWEEN_LOOKS,
    ) -> None:
        self._directory, self._patience, self._seconds_to_end = directory, patience, seconds_to_end
        self._seconds_between_looks = seconds_between_looks
        self._address = ""
        self._has_no_raylet = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="head watch", daemon=True)
        self.message = ""
        """Why the run was interrupted; empty if it was not."""

    def __enter__(self) -> HeadWatch:
        # A trial of a sweep trains outside the main thread; its process ends with the sweep's driver.
        if threading.current_thread() is threading.main_thread():
            self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        self._stop.set()

    def explain(self, error: BaseException) -> str:
        """Explain an error that a lost cluster has caused, and how to continue; empty for an error of another cause."""
        if not isinstance(error, (RayError, TrainingFailedError)) or not self._find_address():
            return ""
        time.sleep(1.0)  # the processes of a head do not all end in the same moment
        if self._is_raylet_lost() or not answers(self._address):
            return self._describe_loss()
        if isinstance(error, _LOST_PROCESS):
            first = (str(error).strip().splitlines() or [""])[0]
            reason = f"Ray has lost a process that the run cannot do without ({type(error).__name__}: {first})"
            return self._note(f"{reason}. To continue, look at the nodes: {describe_continuation(self._directory)}")
        return ""

    def _run(self) -> None:
        answered = time.monotonic()
        while not self._stop.wait(self._seconds_between_looks):
            if self._is_raylet_lost():
                break
            if not self._find_address() or answers(self._address):
                answered = time.monotonic()
            elif time.monotonic() - answered > self._patience:
                break
        else:
            return
        message = self._describe_loss()
        if self._stop.is_set():
            return  # an error of Ray's has ended the run meanwhile
        self.message = message
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        # Ray may wait for the control service while it ends the run, and would then end this process without a word.
        if not self._stop.wait(self._seconds_to_end):
            from jobs.engine.command_line import FAILED, fail

            with suppress(SystemExit):
                fail(self.message, FAILED)
            sys.stderr.flush()
            os._exit(FAILED)

    def _find_address(self) -> str:
        # Kept, because Ray does not tell it any more once it is shut down.
        if not self._address and ray.is_initialized():
            self._address = ray.get_runtime_context().gcs_address
        return self._address

    def _is_raylet_lost(self) -> bool:
        self._has_no_raylet = self._has_no_raylet or is_raylet_lost()
        return self._has_no_raylet

    def _describe_loss(self) -> str:
        if self._has_no_raylet:
            return self._note(
                "Ray's process on this machine that starts the workers, the raylet, was lost: it was killed, perhaps for "
                f"lack of memory, or it crashed. To continue: {describe_continuation(self._directory)}"
            )
        # A Ray that the job has started itself is started by the command.
        remedy = ":" if starts_own_ray() else ", start the cluster again:"
        return self._note(
            f"Ray's head at {self._address} does not answer: the cluster is lost, or its control service is. To continue"
            f"{remedy} {describe_continuation(self._directory)}"
        )

    def _note(self, message: str) -> str:
        with suppress(OSError, ValueError):  # the store may be lost too
            note_failure(self._directory, masked(message), step=registered_step(self._directory), is_final=True)
        return message
