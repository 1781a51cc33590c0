"""Notes in a run's directory for whoever looks later: how far the run is, and why it failed the last time.

`progress.json` is written by the first worker, `failure.json` by whoever sees the failure: Ray Train's controller or the
driver. Neither is needed to continue a run, so that no error in writing them ends it. This module does not import torch,
because it also runs in Ray Train's controller.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any

from pipelines.storage import write_json

PROGRESS_FILE, FAILURE_FILE = "progress.json", "failure.json"

_SECONDS_BETWEEN_NOTES = 10.0
_MAX_CHARACTERS = 2000


class ProgressNotes:
    """Writes the newest progress of a run in the background, at most every `seconds_between` seconds.

    Args:
        directory: path or URI of the run.
        seconds_between: least seconds between two writes; the last progress is written by :meth:`close` in any case.
    """

    def __init__(self, directory: str, *, seconds_between: float = _SECONDS_BETWEEN_NOTES) -> None:
        self._uri = f"{directory}/{PROGRESS_FILE}"
        self._seconds_between = seconds_between
        self._newest: Mapping[str, Any] | None = None
        self._tau_mean: float | None = None
        self._last_noted = time.monotonic()
        self._changed, self._stop = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="progress notes", daemon=True)
        self._thread.start()

    def note(self, step: int, *, loss: float, tau_mean: float | None, seconds_per_step: float) -> None:
        """Note the state after `step` steps; if `tau_mean` is None, the last known mean temperature stays."""
        self._tau_mean = self._tau_mean if tau_mean is None else tau_mean
        now = time.monotonic()
        self._newest = {
            "step": step,
            "loss": loss,
            "tau_mean": self._tau_mean,
            "seconds_per_step": seconds_per_step,
            "seconds_per_note": now - self._last_noted,
            "time": time.time(),
        }
        self._last_noted = now
        self._changed.set()

    def close(self) -> None:
        """Write what is not written yet and end the thread."""
        self._stop.set()
        self._changed.set()
        self._thread.join(timeout=60)

    def _run(self) -> None:
        while True:
            self._changed.wait()
            self._changed.clear()
            if self._newest is not None:
                _write(self._uri, self._newest)
            if self._stop.wait(self._seconds_between):
                if self._changed.is_set() and self._newest is not None:
                    _write(self._uri, self._newest)
                return


def note_failure(directory: str, cause: str, *, step: int, is_final: bool) -> None:
    """Note why a run failed.

    Args:
        directory: path or URI of the run.
        cause: what happened, in one line; secrets must be masked.
        step: the step that it goes on from.
        is_final: whether the run ended, and was not restarted.
    """
    _write(
        f"{directory}/{FAILURE_FILE}",
        {"cause": cause[:_MAX_CHARACTERS], "step": step, "is_final": is_final, "time": time.time()},
    )


def _write(uri: str, content: Mapping[str, Any]) -> None:
    try:
        write_json(uri, content)
    except (OSError, ValueError):
        return  # the storage fails; what trains reports it at the next checkpoint
