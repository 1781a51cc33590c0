"""What Ray says of a run that fails: why its workers ended, whether they are restarted, and that the cluster is lost.

:class:`RestartPolicy` and :class:`CheckpointRecord` run in Ray Train's controller, which does not need torch.

Where the head is lost, Ray raises errors of many kinds; where only its control service is, Ray ends its processes after a
minute, the driver among them, without any exception. So a thread looks whether the head answers (:class:`HeadWatch`).
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from contextlib import suppress
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
from jobs.engine.console import note_failure, say_to
from jobs.engine.masking import masked, printable
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
_SHARE_OF_PATIENCE = 0.75  # of the seconds until Ray ends its processes itself


def as_fatal(error: TrainingFailedError, directory: str, *, max_wait_minutes: float) -> FatalTrainingError:
    """Return what a user is told of a run that Ray Train has ended, and how to continue it."""
    if reason := explain_storage(_failures(error, directory), directory):
        return FatalTrainingError(reason)
    if isinstance(error, ControllerError) and isinstance(error.controller_failure, _NOT_STARTED):
        reason = f"{_describe_wait(error.controller_failure)} within run.max_wait_minutes = {max_wait_minutes:g}"
        return FatalTrainingError(f"{reason}. To continue, add machines: {describe_continuation(directory)}")
    # The error holds tracebacks of the workers; what a person needs is the last line.
    cause = describe_failure(error)
    return FatalTrainingError(f"{error}\n{cause}; {describe_continuation(directory)}", cause)


def _failures(error: TrainingFailedError, directory: str) -> list[BaseException]:
    """Return what the workers raised, or the controller, which itself writes into the run's directory."""
    if isinstance(error, WorkerGroupError):
        return list(error.worker_failures.values())
    failure = error.controller_failure if isinstance(error, ControllerError) else None
    if isinstance(failure, OSError) and is_store(directory):
        return [explain_write(failure, directory)]
    return [failure] if failure else []


def describe_failure(error: TrainingFailedError) -> str:
    """Describe in one line why a group of workers failed; if workers died, not those that failed because of them."""
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

    These are a full disk, a store that refuses to be written, and a wait for machines that takes too long.
    """

    def __init__(self, failure_config: FailureConfig, *, directory: str, max_wait_minutes: float, mailbox: Any) -> None:
        super().__init__(failure_config)  # type: ignore[arg-type]  # Ray annotates the class of Train V1
        self._directory = directory
        self._max_wait_seconds = 60.0 * max_wait_minutes
        self._mailbox = mailbox
        self._waiting_since: float | None = None

    def make_decision(self, training_failed_error: TrainingFailedError) -> FailureDecision:
        """Decide whether to restart the workers: after every failure, and every minute without room for them."""
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
            say_to(self._mailbox, f"{cause}; restart {number}, from step {step}")
        return decision

    def _wait(self, failure: Exception) -> FailureDecision:
        if self._waiting_since is None:
            timeout = float(os.environ.get("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "60"))
            self._waiting_since = time.monotonic() - timeout
        waited = time.monotonic() - self._waiting_since
        if waited >= self._max_wait_seconds:
            return FailureDecision.RAISE
        told = f"{_describe_wait(failure)} for {waited / 60:.3g} minutes now; the run waits for at most"
        say_to(self._mailbox, f"{told} {self._max_wait_seconds / 60:g} (run.max_wait_minutes)")
        return FailureDecision.RETRY


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


class HeadWatch:
    """Context manager that raises a FatalTrainingError for what a lost cluster causes inside its block.

    If nothing says that Ray's head is lost, it interrupts the main thread after some time, as Ctrl-C does.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory
        # So long Ray's processes wait for a control service that is lost before they end themselves.
        self._seconds = float(os.environ.get("RAY_gcs_rpc_server_reconnect_timeout_s", "60"))  # noqa: SIM112 - Ray's spelling
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

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._stop.set()  # an interruption from here on would hide the error
        if error is not None and (message := self.message or self.explain(error)):
            raise FatalTrainingError(message) from error

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
            return self._note(reason, ", look at the nodes")
        return ""

    def _run(self) -> None:
        answered = time.monotonic()
        while not self._stop.wait(_SECONDS_BETWEEN_LOOKS):
            if self._is_raylet_lost():
                break
            if not self._find_address() or answers(self._address):
                answered = time.monotonic()
            elif time.monotonic() - answered > _SHARE_OF_PATIENCE * self._seconds:
                break
        else:
            return
        message = self._describe_loss()
        if self._stop.is_set():
            return  # an error of Ray's has ended the run meanwhile
        # At once: Ray may wait for the control service while it ends the run, and then end this process without a word.
        print(printable(masked(message)), file=sys.stderr, flush=True)
        self.message = message
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

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
                "lack of memory, or it crashed"
            )
        reason = f"Ray's head at {self._address} does not answer: the cluster is lost, or its control service is"
        # A Ray that the job has started itself is started by the command.
        return self._note(reason, "" if starts_own_ray() else ", start the cluster again")

    def _note(self, reason: str, remedy: str = "") -> str:
        message = f"{reason}. To continue{remedy}: {describe_continuation(self._directory)}"
        with suppress(OSError, ValueError):  # the store may be lost too
            note_failure(self._directory, masked(message), step=registered_step(self._directory), is_final=True)
        return message
