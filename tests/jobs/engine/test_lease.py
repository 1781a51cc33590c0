"""Test that a run has one driver: a second is refused while the first lives, and continues once the first is dead."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support import wait_for

from jobs.engine import lease
from jobs.engine.lease import LEASE_FILE, Lease, LostRunError, RunIsTakenError, _machine, _process
from pipelines.storage import read_json


@pytest.fixture(autouse=True)
def fast_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "_SECONDS_TO_SETTLE", 0.05)
    monkeypatch.setattr(lease, "_SECONDS_TO_END", 0.3)


@pytest.fixture
def first() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "100"])
    yield process
    process.kill()
    process.wait()


def write(run: Path, **changes: object) -> None:
    """Write a lease that names this process but has another token and host, with `changes` to its fields."""
    run.mkdir(exist_ok=True)
    owner = {"token": "other", "host": "far", "machine": _machine(), **_process(), "num_beats": 3}
    (run / LEASE_FILE).write_text(json.dumps(owner | changes))


def write_for(process: subprocess.Popen[bytes], run: Path) -> None:
    write(run, **_process(process.pid))


def fast(run: Path | str, *, seconds_to_expire: float = 0.5) -> Lease:
    return Lease(str(run), seconds_between_beats=0.05, seconds_to_expire=seconds_to_expire)


def held_by(run: Path) -> dict[str, object]:
    content: dict[str, object] = json.loads((run / LEASE_FILE).read_text())
    return content


def test_it_is_renewed_and_given_up(tmp_path: Path) -> None:
    with fast(tmp_path / "run"):
        first = held_by(tmp_path / "run")
        time.sleep(0.3)
        later = held_by(tmp_path / "run")
    assert later["num_beats"] > first["num_beats"]  # type: ignore[operator]
    assert later | {"num_beats": 0} == first | {"num_beats": 0}
    assert not (tmp_path / "run").exists()  # The directory held only the lease, so it is removed with it.
    with fast(tmp_path / "run"):
        pass


@pytest.mark.parametrize("brought_back_by", ["nobody", "a checkpoint"])
def test_a_run_whose_directory_is_deleted_ends(tmp_path: Path, brought_back_by: str) -> None:
    """It would go on into a directory without the configuration of its checkpoints."""
    run = tmp_path / "run"

    def lose() -> None:
        with fast(run):
            (run / "configuration.json").write_text("{}")
            time.sleep(0.5)
            shutil.rmtree(run)
            if brought_back_by == "a checkpoint":
                (run / "checkpoint-00000005").mkdir(parents=True)
            with pytest.raises(KeyboardInterrupt):
                time.sleep(20)

    with pytest.raises(LostRunError, match=rf"{run} is gone: it was deleted"):
        lose()
    assert not (run / LEASE_FILE).exists()


def test_the_second_driver_is_refused_while_the_first_lives(
    tmp_path: Path, first: subprocess.Popen[bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    write_for(first, tmp_path)
    with pytest.raises(RunIsTakenError, match=rf"in the hands of process {first.pid} on far.*another run\.name"):
        fast(tmp_path).__enter__()
    assert held_by(tmp_path)["pid"] == first.pid
    # The process is killed, but its parent has not waited for it yet, so it is a zombie.
    first.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, first.pid, os.WEXITED | os.WNOWAIT)
    capsys.readouterr()
    with Lease(str(tmp_path)):
        assert "waiting" not in capsys.readouterr().out


@pytest.mark.parametrize("is_remote", [False, True], ids=["shared directory", "object store"])
def test_a_driver_on_another_machine_is_known_by_its_heartbeats(
    is_remote: bool, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = f"s3://{request.getfixturevalue('bucket')}/runs/run" if is_remote else str(tmp_path)
    first = fast(run)
    first.__enter__()
    monkeypatch.setattr(lease, "_machine", lambda: "elsewhere")
    with pytest.raises(RunIsTakenError, match=f"process {os.getpid()}"):
        fast(run, seconds_to_expire=100.0).__enter__()
    first._stop.set()  # It hangs.
    first._thread.join()
    started = time.monotonic()
    with fast(run, seconds_to_expire=1.0):
        assert time.monotonic() - started >= 1.0
        first.__exit__(None, None, None)  # It leaves the new owner's lease.
        assert (read_json(f"{run}/{LEASE_FILE}") or {})["machine"] == "elsewhere"
    assert read_json(f"{run}/{LEASE_FILE}") is None


def test_a_process_of_this_machine_that_is_gone_holds_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    # In the second case this process has the number of an older process, which held the lease.
    for gone in ({"pid": process.pid}, {"start_ticks": 1}):
        write(tmp_path, **gone)
        with Lease(str(tmp_path)):
            assert "waiting" not in capsys.readouterr().out


def test_a_driver_that_is_about_to_end_is_waited_for(
    tmp_path: Path, first: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "_SECONDS_TO_END", 10.0)
    write_for(first, tmp_path)
    threading.Timer(0.3, first.kill).start()
    with fast(tmp_path):
        assert psutil.Process(first.pid).status() == psutil.STATUS_ZOMBIE


def test_of_two_that_start_together_the_one_that_wrote_first_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease.time, "sleep", lambda seconds: write(tmp_path))
    with pytest.raises(RunIsTakenError, match="on far"):
        fast(tmp_path).__enter__()
    assert held_by(tmp_path)["token"] == "other"


def test_who_loses_the_lease_is_interrupted_and_leaves_the_new_owners(tmp_path: Path) -> None:
    def train() -> None:
        with fast(tmp_path):
            write(tmp_path)
            time.sleep(10)
            raise AssertionError("it went on")

    with pytest.raises(RunIsTakenError, match="on far"):
        train()
    assert held_by(tmp_path)["token"] == "other"


def test_a_storage_that_fails_for_a_while_costs_nothing(tmp_path: Path) -> None:
    with fast(tmp_path / "run", seconds_to_expire=60.0):
        (tmp_path / "run").rename(tmp_path / "away")
        time.sleep(0.3)
        (tmp_path / "away").rename(tmp_path / "run")
        before = held_by(tmp_path / "run")
        wait_for(lambda: held_by(tmp_path / "run") != before)


def test_a_damaged_lease_expires(tmp_path: Path) -> None:
    (tmp_path / LEASE_FILE).write_text('{"token": "ab')
    started = time.monotonic()
    with fast(tmp_path):
        assert time.monotonic() - started >= 0.5
