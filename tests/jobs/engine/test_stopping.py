"""Test what SIGTERM does to a run that has a grace period, in which Ray Train's own handler gives place to ours."""

from __future__ import annotations

import signal
import threading
import time

import pytest

from jobs.engine.stopping import StopRequests, stopping_softly
from jobs.engine.worker_context import WorkerContext


@pytest.mark.parametrize(
    ("grace_seconds", "obeys", "num_signals", "expected"),
    [
        # The workers save within the period, and a second signal, after the block, means what it did before.
        (20, True, 2, ["saved 1", "ended 1"]),
        # A second signal inside the block ends the run at once, and so does the end of the period.
        (20, False, 2, ["ended 1"]),
        (0.2, False, 1, ["ended 1"]),
        # Without a period the first signal ends it.
        (0, False, 1, ["ended 0"]),
    ],
)
def test_sigterm(grace_seconds: float, obeys: bool, num_signals: int, expected: list[str]) -> None:
    asked: list[int] = []
    said: list[str] = []
    found: list[str] = []

    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    end = time.monotonic() + 10
    try:
        with stopping_softly(lambda: asked.append(1), grace_seconds=grace_seconds, say=said.append):
            signal.raise_signal(signal.SIGTERM)
            while time.monotonic() < end and not (asked and obeys):
                if asked and num_signals == 2:
                    signal.raise_signal(signal.SIGTERM)
                time.sleep(0.01)
        found.append(f"saved {len(asked)}")
        signal.raise_signal(signal.SIGTERM)
    except KeyboardInterrupt:
        found.append(f"ended {len(asked)}")
    finally:
        after = signal.signal(signal.SIGTERM, before)
    assert after is signal.default_int_handler
    assert found == expected
    assert [line.startswith("told to end: saving the current step") for line in said] == [True] * (grace_seconds > 0)


def test_another_thread_leaves_signals_alone() -> None:
    seen = []

    def run() -> None:
        with stopping_softly(lambda: None, grace_seconds=1.0, say=print):
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGTERM)]


def test_all_workers_answer_alike() -> None:
    requests = StopRequests(WorkerContext(rank=1, world_size=2, local_world_size=2, report=lambda *_, **__: None))
    assert requests.answer([0, 0, 0]) == (False, False)
    assert requests.answer([1, 0, 0]) == (True, False)
    assert requests.answer([0, 1, 0]) == (True, False)
    assert requests.answer([0, 0, 2]) == (True, True)
