"""Ends a run with one clear line if Ray's head, or the control service on it, is lost.

Where the whole head is lost, Ray raises errors of many kinds. Where only the control service is lost, Ray goes on for a
minute, in which the service may come back, and then ends its processes, the driver among them, without any exception.
So a thread looks whether the head answers, and interrupts the run shortly before that.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import ray
from ray.exceptions import NodeDiedError, ObjectLostError, RayActorError, RayError, RaySystemError, RpcError
from ray.train.v2.api.exceptions import TrainingFailedError

from jobs.engine.cluster import answers
from jobs.engine.command_line import FAILED, fail
from jobs.engine.failures import describe_continuation
from jobs.engine.job import FatalTrainingError
from jobs.engine.masking import masked
from jobs.engine.progress import note_failure
from jobs.engine.ray_private import is_raylet_lost
from jobs.engine.resumption import registered_step

_LOST_PROCESS = (NodeDiedError, ObjectLostError, RayActorError, RaySystemError, RpcError)
_SECONDS_BETWEEN_LOOKS = 2.0
_SHARE_OF_PATIENCE, _SHARE_TO_END = 0.75, 0.15  # of the seconds until Ray ends its processes itself


class LostClusterError(FatalTrainingError):
    """Ray's head, its control service or another process that the run cannot do without is lost."""


@contextmanager
def naming_lost_cluster(directory: str) -> Iterator[None]:
    """Convert what a lost cluster causes inside the block into a :class:`LostClusterError`, and notice a loss without error.

    Args:
        directory: path or URI of the run.

    Raises:
        LostClusterError: if the cluster is lost; every other error is raised unchanged.
    """
    seconds = _seconds_until_ray_ends()
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
    """Context manager that interrupts the main thread, as Ctrl-C does, if Ray's head does not answer for some time.

    Args:
        directory: path or URI of the run.
        patience: seconds without an answer after which the head is considered lost.
        seconds_to_end: seconds that the block then has to end, before the process is ended.
        seconds_between_looks: seconds between two attempts to reach it.
    """

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
        """Interrupt nothing any more."""
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
        remedy = ", start the cluster again:" if os.environ.get("RAY_ADDRESS") else ":"
        return self._note(
            f"Ray's head at {self._address} does not answer: the cluster is lost, or its control service is. To continue"
            f"{remedy} {describe_continuation(self._directory)}"
        )

    def _note(self, message: str) -> str:
        with suppress(OSError, ValueError):  # the store may be lost too
            note_failure(self._directory, masked(message), step=registered_step(self._directory), is_final=True)
        return message


def _seconds_until_ray_ends() -> float:
    """Return how long Ray's processes wait for a control service that is lost before they end themselves."""
    return float(os.environ.get("RAY_gcs_rpc_server_reconnect_timeout_s", "60"))  # noqa: SIM112 - Ray's spelling
