"""Tests that a run has one driver: a second is refused while the first lives, and continues once the first is dead."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from jobs.engine import lease
from jobs.engine.lease import LEASE_FILE, Lease, RunIsTakenError, _machine, _process
from pipelines.storage import read_json

HOLD = """
import sys, time
from jobs.engine.lease import Lease
with Lease(sys.argv[1], seconds_between_beats=0.1):
    print("held", flush=True)
    time.sleep(100)
"""


@contextmanager
def holder(run: Path | str) -> Iterator[subprocess.Popen[str]]:
    """Starts another process that holds the lease, and kills it at the end of the block."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(run)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.wait()


def write(run: Path, **changes: object) -> None:
    """Writes a lease that names this process but has another token and host, with `changes` to its fields."""
    run.mkdir(exist_ok=True)
    owner = {"token": "other", "host": "far", "machine": _machine(), **_process(), "num_beats": 3}
    (run / LEASE_FILE).write_text(json.dumps(owner | changes))


def fast(run: Path) -> Lease:
    return Lease(str(run), seconds_between_beats=0.1, seconds_to_expire=1.0)


def held_by(run: Path) -> dict[str, object]:
    content: dict[str, object] = json.loads((run / LEASE_FILE).read_text())
    return content


def test_it_is_renewed_and_given_up(tmp_path: Path) -> None:
    with fast(tmp_path / "run"):
        first = held_by(tmp_path / "run")
        time.sleep(0.5)
        later = held_by(tmp_path / "run")
    assert later["num_beats"] > first["num_beats"]  # type: ignore[operator]
    assert later | {"num_beats": 0} == first | {"num_beats": 0}
    assert not (tmp_path / "run").exists()  # The directory held only the lease, so it is removed with it.
    with fast(tmp_path / "run"):
        pass


def test_the_second_driver_is_refused_while_the_first_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "_SECONDS_TO_END", 0.5)
    with holder(tmp_path) as process:
        with pytest.raises(RunIsTakenError, match=rf"in the hands of process {process.pid} on .*another run\.name"):
            fast(tmp_path).__enter__()
        # From another machine the process cannot be seen, but its heartbeats show that it lives.
        started = time.monotonic()
        monkeypatch.setattr(lease, "_machine", lambda: "elsewhere")
        with pytest.raises(RunIsTakenError, match=f"process {process.pid}"):
            Lease(str(tmp_path), seconds_between_beats=0.1, seconds_to_expire=100.0).__enter__()
        assert time.monotonic() - started < 5
        monkeypatch.undo()
        assert held_by(tmp_path)["pid"] == process.pid
        # The process is killed, but its parent has not waited for it yet, so it is a zombie.
        process.send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        started = time.monotonic()
        with Lease(str(tmp_path)):
            assert time.monotonic() - started < 2


def test_in_an_object_store_the_second_driver_is_refused_until_the_first_is_dead(
    bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second driver is on another machine, so that it knows of the first only what is in the store."""
    run = f"s3://{bucket}/runs/run"
    with holder(run) as process:
        monkeypatch.setattr(lease, "_machine", lambda: "elsewhere")
        with pytest.raises(RunIsTakenError, match=f"process {process.pid}"):
            Lease(run, seconds_between_beats=0.1, seconds_to_expire=100.0).__enter__()
    started = time.monotonic()
    with Lease(run, seconds_between_beats=0.1, seconds_to_expire=2.0):
        assert time.monotonic() - started >= 2.0
        assert read_json(f"{run}/{LEASE_FILE}")["machine"] == "elsewhere"  # type: ignore[index]  # it exists
    assert read_json(f"{run}/{LEASE_FILE}") is None


def test_a_process_of_this_machine_that_is_gone_holds_nothing(tmp_path: Path) -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    # In the second case this process has the number of an older process, which held the lease.
    for gone in ({"pid": process.pid}, {"started": 1.0}):
        write(tmp_path, **gone)
        started = time.monotonic()
        with Lease(str(tmp_path)):
            assert time.monotonic() - started < 2


def test_a_dead_driver_of_another_machine_expires(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, machine="elsewhere", pid=7)
    started = time.monotonic()
    with fast(tmp_path):
        assert 1.0 <= time.monotonic() - started < 3.0
    assert "held by process 7 on far: waiting 1 s to see whether that is still alive" in capsys.readouterr().out


def test_a_driver_that_is_about_to_end_is_waited_for(tmp_path: Path) -> None:
    with holder(tmp_path) as process:
        threading.Timer(1.0, process.kill).start()
        with Lease(str(tmp_path), seconds_between_beats=0.1):
            assert process.poll() is not None or psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE


def test_a_damaged_lease_expires(tmp_path: Path) -> None:
    (tmp_path / LEASE_FILE).write_text('{"token": "ab')
    started = time.monotonic()
    with fast(tmp_path):
        assert time.monotonic() - started >= 1.0


def test_of_two_that_start_together_the_one_that_wrote_first_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other_writes(seconds: float) -> None:
        write(tmp_path)

    monkeypatch.setattr(lease.time, "sleep", other_writes)
    with pytest.raises(RunIsTakenError, match="on far"):
        fast(tmp_path).__enter__()
    assert held_by(tmp_path)["token"] == "other"


def test_who_loses_the_lease_is_interrupted_and_leaves_the_new_owners(tmp_path: Path) -> None:
    def train() -> None:
        with fast(tmp_path):
            write(tmp_path)
            time.sleep(10)
            raise AssertionError("it went on")

    started = time.monotonic()
    with pytest.raises(RunIsTakenError, match="on far"):
        train()
    assert time.monotonic() - started < 5
    assert held_by(tmp_path)["token"] == "other"


def test_a_storage_that_fails_for_a_while_costs_nothing(tmp_path: Path) -> None:
    with fast(tmp_path / "run"):
        (tmp_path / "run").rename(tmp_path / "away")
        time.sleep(0.5)
        (tmp_path / "away").rename(tmp_path / "run")
        time.sleep(0.3)
        before = held_by(tmp_path / "run")
        time.sleep(0.3)
        assert held_by(tmp_path / "run") != before
