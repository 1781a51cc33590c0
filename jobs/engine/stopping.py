"""Requests to save a run before something ends it: the driver was told to end, a node is about to be taken away, or the run
is about to have more workers.

Every worker looks for requests at every step, and the loop's all-reduce tells all workers of them, so that they save the
same step. A request costs no communication of its own.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from jobs.engine.worker import Terminal, WorkerContext

_SECONDS_BETWEEN_QUESTIONS = 0.5


class StopRequests:
    """The requests that a worker knows of.

    Only the first worker asks the terminal, in which the driver and Ray Train's controller leave requests.
    """

    def __init__(self, context: WorkerContext) -> None:
        self._is_preempted = context.is_preempted
        self._is_saving, self._is_stopping = threading.Event(), threading.Event()
        self._closed = threading.Event()
        self._is_answered = False
        if context.rank == 0 and context.terminal is not None:
            threading.Thread(target=self._ask, args=(context.terminal,), name="stop requests", daemon=True).start()

    def read(self) -> tuple[bool, bool, bool]:
        """Return whether a node of this run is about to be taken away, whether to save, and whether the run is to stop."""
        is_preempted = not self._is_answered and self._is_preempted()
        return is_preempted, self._is_saving.is_set(), self._is_stopping.is_set()

    def answer(self, num_requests: Iterable[Any]) -> tuple[bool, bool]:
        """Return whether to save and whether to stop, which is the same on all workers.

        The notice about a node reaches the workers one by one; it is answered once, when the first of them has it.
        """
        is_preempted, is_saving, is_stopping = (bool(number) for number in num_requests)
        self._is_answered |= is_preempted
        if is_saving:
            self._is_saving.clear()
        return is_preempted or is_saving or is_stopping, is_stopping

    def close(self) -> None:
        """Stop asking."""
        self._closed.set()

    def _ask(self, terminal: Terminal) -> None:
        num_saves: int | None = None  # requests from before this worker was started were answered by its predecessor
        while not self._closed.wait(_SECONDS_BETWEEN_QUESTIONS):
            if (answer := terminal.requests()) is None:
                continue
            must_stop, asked = answer
            if num_saves is not None and asked > num_saves:
                self._is_saving.set()
            num_saves = asked
            if must_stop:
                self._is_stopping.set()
                return


@contextmanager
def stopping_softly(ask: Callable[[], None], *, grace_seconds: float, say: Callable[[str], None]) -> Iterator[None]:
    """Let the first SIGTERM inside the block only ask the workers to save and stop; a second one ends the run at once.

    If the workers have not stopped after the grace period, the run is ended as by Ctrl-C. Outside the main thread, which
    alone may handle signals, and without a grace period, SIGTERM means what it did before.
    """
    if threading.current_thread() is not threading.main_thread() or not grace_seconds:
        yield
        return
    main = threading.get_ident()
    timer = threading.Timer(grace_seconds, lambda: signal.pthread_kill(main, signal.SIGINT))
    timer.daemon = True
    is_asked = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal is_asked
        if is_asked:
            raise KeyboardInterrupt
        is_asked = True
        say(f"told to end: saving the current step, for at most {grace_seconds:g} s (run.grace_seconds)")
        ask()
        timer.start()

    before = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        timer.cancel()
        signal.signal(signal.SIGTERM, before)
