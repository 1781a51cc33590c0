"""Messages and progress of the workers, carried to the driver's terminal by a small Ray actor.

Ray's own forwarding of worker output would mix them with the log messages of every library. Here only what is meant for
the user arrives: with a progress bar on a terminal, as plain lines in a log file.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from contextlib import suppress
from typing import Any

import ray
from ray.actor import ActorHandle
from tqdm import tqdm

from jobs.engine.masking import printable
from jobs.engine.progress import ProgressNotes
from jobs.engine.stall import Sign, StallWatch, describe_signs
from jobs.engine.worker_context import Terminal
from pipelines.actor_start import on_this_node, wait_until_started

_SECONDS_BETWEEN_POLLS = 0.5


class _Mailbox:
    """Ray actor that keeps the workers' lines and their last progress until the driver fetches them."""

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
        return self._must_stop, self._num_saves

    def say(self, line: str) -> None:
        self._lines.append(line)

    def show(self, step: int, text: str) -> None:
        self._progress = (step, text)

    def sign(self, rank: int, step: int, place: str) -> None:
        if rank in self._signs and step < self._signs[rank][0]:
            self._signs = {}  # other workers have begun
        self._signs[rank] = (step, place, time.monotonic())

    def fetch(self) -> tuple[list[str], tuple[int, str] | None, dict[int, Sign]]:
        now = time.monotonic()
        signs = {rank: (step, place, now - when) for rank, (step, place, when) in self._signs.items()}
        fetched = (self._lines, self._progress, signs)
        self._lines = []
        return fetched


class Console:
    """Prints the workers' messages in the driver; use it as a context around training, and pass `mailbox` to the workers."""

    def __init__(self, num_steps: int, *, max_stall_minutes: float = 0.0) -> None:
        self._stalls, self._max_stall_seconds = StallWatch(), 60.0 * max_stall_minutes
        self.stalled = ""
        """Why the run was interrupted; empty if it was not."""
        mailbox: Any = ray.remote(_Mailbox)
        self.mailbox: ActorHandle = mailbox.options(num_cpus=0, scheduling_strategy=on_this_node()).remote()
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
        # The packed job holds the handle too, so Ray would keep the actor's process for as long as this process lives.
        with suppress(ray.exceptions.RayError):
            ray.kill(self.mailbox)

    def _run(self) -> None:
        wait_until_started(self.mailbox)
        while not self._stop.wait(_SECONDS_BETWEEN_POLLS):
            self._show()

    def _show(self) -> None:
        try:
            fetched: Any = ray.get(self.mailbox.fetch.remote(), timeout=10)
        except ray.exceptions.RayError:
            return  # the cluster is shutting down; the job itself reports why
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

    It goes to the driver's terminal and, for whoever looks later, into the run's directory (`jobs.engine.progress`).
    """

    def __init__(
        self,
        terminal: Terminal | None,
        *,
        num_steps: int,
        first_step: int,
        unit: str,
        with_lines: bool,
        directory: str,
    ) -> None:
        self._terminal = terminal
        self._num_steps = num_steps
        self._first_step = first_step
        self._started = time.monotonic()
        self._unit = unit
        self._with_lines = with_lines
        self._notes = ProgressNotes(directory)
        if first_step:
            self.say(f"continuing after step {first_step}")

    def show(self, step: int, loss: float, tau_mean: float | None, units_per_second: float) -> None:
        """Show the progress after `step` steps; `tau_mean` is None if it is not known."""
        seconds_per_step = (time.monotonic() - self._started) / (step - self._first_step)
        self._notes.note(step, loss=loss, tau_mean=tau_mean, seconds_per_step=seconds_per_step)
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
        self._notes.close()

    def say(self, line: str) -> None:
        """Print one line on the driver's terminal, or in the worker's log if there is none."""
        if self._terminal is None:
            print(line, flush=True)  # goes to the worker's log
        else:
            self._terminal.say(line)


def clock(seconds: float) -> str:
    """Returns a duration as hours, minutes and seconds, without hours if there are none."""
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"
