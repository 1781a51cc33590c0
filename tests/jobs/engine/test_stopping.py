"""Test what SIGTERM does to a run that has a grace period, in a process of its own with the handler of Ray Train's place."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from jobs.engine.stopping import StopRequests, stopping_softly
from jobs.engine.worker_context import WorkerContext

ROOT = Path(__file__).parents[3]

SCRIPT = """
import signal, sys, time
from jobs.engine.stopping import stopping_softly

asked = []
signal.signal(signal.SIGTERM, signal.default_int_handler)
try:
    with stopping_softly(lambda: asked.append(1), grace_seconds=float(sys.argv[1]), say=lambda line: print(line, flush=True)):
        print("ready", flush=True)
        end = time.monotonic() + 30
        while time.monotonic() < end and not (asked and sys.argv[2] == "obey"):
            time.sleep(0.01)
    print("saved", len(asked), flush=True)
    time.sleep(30)
except KeyboardInterrupt:
    print("ended", len(asked), flush=True)
"""


@pytest.mark.parametrize(
    ("grace_seconds", "manner", "num_signals", "expected"),
    [
        # The workers save within the period, and a second signal, after the block, means what it did before.
        (20, "obey", 2, ["saved 1", "ended 1"]),
        # A second signal inside the block ends the run at once, and so does the end of the period.
        (20, "ignore", 2, ["ended 1"]),
        (0.3, "ignore", 1, ["ended 1"]),
        # Without a period the first signal ends it.
        (0, "ignore", 1, ["ended 0"]),
    ],
)
def test_sigterm(grace_seconds: float, manner: str, num_signals: int, expected: list[str]) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(grace_seconds), manner], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    for _ in range(num_signals):
        process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
    said, _ = process.communicate(timeout=60)
    assert [line for line in said.splitlines() if not line.startswith("told to end")] == expected
    assert ("told to end: saving the current step" in said) == (grace_seconds > 0)


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
