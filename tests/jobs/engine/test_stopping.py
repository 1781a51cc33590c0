"""Test what SIGTERM does to a run that has a grace period, in which Ray Train's own handler gives place to ours."""

from __future__ import annotations

import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from jobs.engine import console, loop
from jobs.engine.console import StallWatch, describe_signs
from jobs.engine.launch import stopping_softly
from jobs.engine.worker import WorkerContext


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
def test_sigterm(
    grace_seconds: float, obeys: bool, num_signals: int, expected: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[int] = []
    found: list[str] = []

    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    end = time.monotonic() + 10
    try:
        with stopping_softly(lambda: asked.append(1), grace_seconds):
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
    assert capsys.readouterr().out.count("received SIGTERM: saving the current step") == (grace_seconds > 0)


def test_another_thread_leaves_signals_alone() -> None:
    def handler() -> object:
        with stopping_softly(print, 1.0):
            return signal.getsignal(signal.SIGTERM)

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(handler).result() is signal.getsignal(signal.SIGTERM)


def test_a_run_that_makes_no_step_is_described_after_a_minute_and_then_less_and_less_often() -> None:
    watch = StallWatch()
    signs = {0: (37, "_train_step (loop.py:190), in all_reduce", 2.0), 1: (37, "read (pairs.py:9)", 61.0)}
    assert watch.look({0: (36, "", 0.0), 1: (37, "", 0.0)}, now=0.0) == (0.0, "")
    assert watch.look(signs, now=1.0) == (0.0, "")
    looks = [watch.look(signs, now=1.0 + second) for second in range(1, 300)]
    assert [waited for waited, line in looks if line] == [60.0, 120.0, 240.0]
    assert looks[59][1] == f"no step for 60 s, after step 37: {describe_signs(signs)}"
    assert describe_signs(signs) == (
        "worker 1 has given no sign for 61 s (last in read (pairs.py:9)); "
        "worker 0 is in _train_step (loop.py:190), in all_reduce"
    )
    assert watch.look(signs | {0: (38, "", 0.0)}, now=400.0) == (0.0, "")


def test_a_worker_tells_where_its_main_thread_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "_SECONDS_BETWEEN_QUESTIONS", 0.01)
    mailbox = console.Mailbox()
    contact = loop.Contact(
        WorkerContext(rank=3, world_size=4, local_world_size=4, report=print, terminal=mailbox), lambda: 5
    )
    threading.Event().wait(0.5)
    contact.close()
    step, place, _ = mailbox.fetch()[2][3]
    assert step == 5
    assert place.startswith("test_a_worker_tells_where_its_main_thread_is (test_stopping.py:")
    assert place.endswith(", in wait")


def test_the_signs_of_all_workers_are_kept_until_others_have_begun() -> None:
    mailbox = console.Mailbox()
    for rank in (0, 1):
        mailbox.sign(rank, 7, "all_reduce")
    assert mailbox.fetch()[2].keys() == {0, 1}
    mailbox.sign(0, 4, "train_step")  # a new group of workers goes on from a checkpoint
    assert mailbox.fetch()[2].keys() == {0}
