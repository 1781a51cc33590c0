"""What a run says while it trains: on the terminal, in its directory, and of workers that make no step.

Messages and progress of the workers go through a mailbox to the driver: with a bar on a terminal, as lines in a log file.
Whoever looks later finds `progress.json`, written by the first worker, and `failure.json`. No error in writing them ends
a run.

A worker can hang without any error: in a read from a dead mount, or in a collective operation that another worker never
reaches. Every worker therefore tells the driver how many steps it has made and where it is (`jobs.engine.loop.Contact`).

Nothing here imports torch or Ray, because it also runs in Ray Train's controller.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

from tqdm import tqdm

from jobs.engine.config import RunSection
from jobs.engine.masking import printable
from pipelines.storage import write_json

PROGRESS_FILE, FAILURE_FILE = "progress.json", "failure.json"
_SECONDS_BETWEEN_NOTES = 10.0
_MAX_CHARACTERS = 2000
_SECONDS_BETWEEN_POLLS = 0.5
_SECONDS_TO_STALL = 60.0
_SECONDS_TO_BE_SILENT = 20.0  # four times as long as between signs of life
_MAX_WORKERS_NAMED = 8
_OURS = str(Path(__file__).parents[2])

Sign: TypeAlias = tuple[int, str, float]
"""Number of steps, the place of the main thread, and the age in seconds of a worker's last sign of life."""
Fetched: TypeAlias = tuple[list[str], tuple[int, str] | None, dict[int, Sign]]
"""The lines that have come since the last call, the last progress, and the signs of life by rank."""


def say_to(mailbox: Any, line: str) -> None:
    """Print a line on the terminal that a mailbox leads to; None: on standard output."""
    if mailbox is None:
        print(line, flush=True)
    else:
        mailbox.say(line)


class Mailbox:
    """Keeps the workers' lines and last progress until the driver fetches them, and its requests to them.

    To workers in other processes it is an actor of Ray (`jobs.engine.ray_train.RemoteMailbox`).
    """

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._progress: tuple[int, str] | None = None
        self._must_stop = False
        self._num_saves = 0
        self._signs: dict[int, tuple[int, str, float]] = {}

    def ask_to_save(self) -> None:
        self._num_saves += 1

    def ask_to_stop(self) -> None:
        self._must_stop = True

    def requests(self) -> tuple[bool, int]:
        """Return whether the run is to stop, and how often it was asked to save."""
        return self._must_stop, self._num_saves

    def say(self, line: str) -> None:
        self._lines.append(line)

    def show(self, step: int, text: str) -> None:
        self._progress = (step, text)

    def sign(self, rank: int, step: int, place: str) -> None:
        """Keep a sign of life of a worker: how many steps it has made, and where it is."""
        if rank in self._signs and step < self._signs[rank][0]:
            self._signs = {}  # other workers have begun
        self._signs[rank] = (step, place, time.monotonic())

    def fetch(self) -> Fetched:
        now = time.monotonic()
        signs = {rank: (step, place, now - when) for rank, (step, place, when) in self._signs.items()}
        fetched: Fetched = (self._lines, self._progress, signs)
        self._lines = []
        return fetched

    def wait(self) -> None:
        pass

    def close(self) -> None:
        pass


class Console:
    """Context manager that prints in the driver what the workers put into the mailbox."""

    def __init__(self, mailbox: Any, num_steps: int, *, max_stall_minutes: float = 0.0) -> None:
        self.mailbox = mailbox
        self._stalls, self._max_stall_seconds = StallWatch(), 60.0 * max_stall_minutes
        self.stalled = ""
        """Why the run was interrupted; empty if it was not."""
        self._bar = tqdm(total=num_steps, unit="step", disable=None, dynamic_ncols=True)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="console", daemon=True)

    def __enter__(self) -> Console:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join(timeout=10)
        self._show()
        self._bar.close()
        self.mailbox.close()

    def _run(self) -> None:
        self.mailbox.wait()
        while not self._stop.wait(_SECONDS_BETWEEN_POLLS):
            self._show()

    def _show(self) -> None:
        fetched: Fetched | None = self.mailbox.fetch()
        if fetched is None:
            return
        lines, progress, signs = fetched
        waited, stall = self._stalls.look(signs)
        if self._max_stall_seconds and waited > self._max_stall_seconds and signs and not self.stalled:
            self.stalled = (
                f"no step for {waited:.0f} s, longer than run.max_stall_minutes = {self._max_stall_seconds / 60:g}: "
                f"{describe_signs(signs)}"
            )
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)  # ends the run as Ctrl-C does
        for line in [*lines, *filter(None, [stall])]:
            tqdm.write(printable(line), file=sys.stdout)
        sys.stdout.flush()
        if progress and not self._bar.disable:
            step, text = progress
            self._bar.set_description_str(text, refresh=False)
            self._bar.update(step - self._bar.n)


class Progress:
    """Reports a worker's progress: step, loss, mean τ, units (tokens, pairs) per second and the remaining time.

    It goes to the driver's terminal and, from time to time in the background, into the directory of the run.
    """

    def __init__(self, context: Any, run: RunSection, *, first_step: int, unit: str, with_lines: bool) -> None:
        self._terminal, self.say = context.terminal, context.say
        self._num_steps, self._first_step = run.num_steps, first_step
        self._started = self._last_shown = time.monotonic()
        self._unit, self._with_lines = unit, with_lines
        self._uri = f"{run.directory}/{PROGRESS_FILE}"
        self._newest: Mapping[str, Any] = {}
        self._tau_mean: float | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="progress notes", daemon=True)
        self._thread.start()
        if first_step:
            self.say(f"continuing after step {first_step}")

    def show(self, step: int, loss: float, tau_mean: float | None, units_per_second: float) -> None:
        """Show the progress after `step` steps; if `tau_mean` is None, the last known one is noted."""
        now = time.monotonic()
        seconds_per_step = (now - self._started) / (step - self._first_step)
        self._tau_mean = self._tau_mean if tau_mean is None else tau_mean
        self._newest = {
            "step": step,
            "loss": loss,
            "tau_mean": self._tau_mean,
            "seconds_per_step": seconds_per_step,
            "seconds_per_note": now - self._last_shown,
            "time": time.time(),
        }
        self._last_shown = now
        if self._terminal is None:
            return
        tau = "" if tau_mean is None else f"  mean τ {tau_mean:.4g}"
        text = f"loss {loss:.4f}{tau}  {units_per_second:,.0f} {self._unit}/s"
        self._terminal.show(step, text)
        if self._with_lines:
            left = seconds_per_step * (self._num_steps - step)
            width = len(str(self._num_steps))
            self.say(f"step {step:>{width}}/{self._num_steps}  {text}  {clock(left)} left")

    def close(self) -> None:
        """Write the last progress into the run's directory."""
        self._stop.set()
        self._thread.join(timeout=60)

    def _run(self) -> None:
        written, is_last = self._newest, False
        while not is_last:
            # The first note does not wait, so that whoever looks soon finds one.
            is_last = self._stop.wait(_SECONDS_BETWEEN_NOTES if written else 1.0)
            if (newest := self._newest) is not written:
                _write(self._uri, newest)
                written = newest


def note_failure(directory: str, cause: str, *, step: int, is_final: bool) -> None:
    _write(
        f"{directory}/{FAILURE_FILE}",
        {"cause": cause[:_MAX_CHARACTERS], "step": step, "is_final": is_final, "time": time.time()},
    )


def _write(uri: str, content: Mapping[str, Any]) -> None:
    with suppress(OSError, ValueError):  # the storage fails; what trains reports it at the next checkpoint
        write_json(uri, content)


def place_of(thread: int) -> str:
    """Return function, file and line of the innermost call of a thread in code of this project, and what it has called."""
    frame = innermost = sys._current_frames().get(thread)
    while frame is not None and not frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    if innermost is None:
        return "nowhere"
    own = frame or innermost
    called = "" if own is innermost else f", in {innermost.f_code.co_name}"
    return f"{own.f_code.co_name} ({Path(own.f_code.co_filename).name}:{own.f_lineno}){called}"


class StallWatch:
    """Looks at the workers' signs of life, and describes a run that makes no step: after a minute, two, four, and so on."""

    def __init__(self) -> None:
        self._steps: Mapping[int, int] = {}
        self._since = time.monotonic()
        self._next = _SECONDS_TO_STALL

    def look(self, signs: Mapping[int, Sign], now: float | None = None) -> tuple[float, str]:
        """Return for how many seconds no worker has made a step, and a line for the user; empty if none is due."""
        moment = time.monotonic() if now is None else now
        steps = {rank: step for rank, (step, _, _) in signs.items()}
        if steps != self._steps:
            self._steps, self._since, self._next = steps, moment, _SECONDS_TO_STALL
        waited = moment - self._since
        if waited < self._next or not signs:
            return waited, ""
        self._next *= 2
        return waited, f"no step for {waited:.0f} s, after step {max(steps.values())}: {describe_signs(signs)}"


def describe_signs(signs: Mapping[int, Sign]) -> str:
    """Describe where the workers stand, those first that give no sign."""
    silent, others = [], []
    for rank, (_, place, age) in sorted(signs.items()):
        if age > _SECONDS_TO_BE_SILENT:
            silent.append(f"worker {rank} has given no sign for {age:.0f} s (last in {place})")
        else:
            others.append(f"worker {rank} is in {place}")
    told = silent + others
    more = f"; and {len(told) - _MAX_WORKERS_NAMED} more" if len(told) > _MAX_WORKERS_NAMED else ""
    return "; ".join(told[:_MAX_WORKERS_NAMED]) + more


def clock(seconds: float) -> str:
    """Returns a duration as hours, minutes and seconds, without hours if there are none."""
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"
