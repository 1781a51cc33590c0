"""A lease that lets only one driver at a time train a run: a file in the run's directory that the owner keeps renewing.

The lease file names its owner and counts heartbeats. A driver that finds the lease of another owner

* continues at once if the owner was a process of this machine that has ended. If it is still running, it gets some
  seconds to end, as a job that was just killed may need them; after that the start is refused;
* otherwise (another machine or container) watches the heartbeat count. If it stays the same for `seconds_to_expire`,
  the owner is considered dead. The clocks of different machines are never compared.

Object stores have no atomic "create if absent", so a new owner writes its name, waits, and reads back which name the file
holds. Of two drivers that start together, the one that wrote last continues. A driver whose name was overwritten later,
because one of them was slow or did not reach the storage for longer than the expiry, ends itself at its next heartbeat;
until then two may train the same run.
"""

from __future__ import annotations

import os
import platform
import signal
import threading
import time
import uuid
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
from pyarrow.fs import LocalFileSystem

from jobs.engine import FailedError
from pipelines.storage import create_directory, exists, read_json, resolve, write_json

LEASE_FILE = "lease.json"

_SECONDS_TO_SETTLE = 0.5
_SECONDS_TO_END = 5.0


class RunIsTakenError(ValueError):
    """Another driver holds the lease of the run."""


class LostRunError(FailedError):
    """The directory of a run that trains is gone."""


class Lease:
    """Context manager that holds the lease of a run inside its block."""

    def __init__(self, directory: str, *, seconds_between_beats: float = 10.0, seconds_to_expire: float = 60.0) -> None:
        self._directory = directory
        self._uri = f"{directory}/{LEASE_FILE}"
        self._seconds_between_beats, self._seconds_to_expire = seconds_between_beats, seconds_to_expire
        self._owner = {"token": uuid.uuid4().hex, "host": platform.node(), "machine": _machine(), **_process()}
        self._num_beats = 0
        self._lost_to: dict[str, Any] | None = None
        self._is_gone = self._was_claimed = False
        self._missing_since = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)

    def __enter__(self) -> Lease:
        held = self._read()
        if held is not None and not is_ended_here(held):
            self._wait_until_dead(held)
        create_directory(self._directory)
        self._beat()
        time.sleep(_SECONDS_TO_SETTLE)
        held = self._read()
        if held is None or not self._is_mine(held):
            raise self._taken(held or {})
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        if self._lost_to is not None:
            raise self._taken(self._lost_to) from error
        if self._is_gone:
            raise LostRunError(
                f"{self._directory} is gone: it was deleted, or its storage has vanished, while the run trained"
            ) from error
        with suppress(OSError):  # a lease that is not deleted expires by itself
            if self._is_mine(self._read() or {}):
                filesystem, path = resolve(self._uri)
                filesystem.delete_file(path)
                if isinstance(filesystem, LocalFileSystem):
                    Path(path).parent.rmdir()  # only an empty one: a run that could not start leaves nothing behind

    def _wait_until_dead(self, held: dict[str, Any]) -> None:
        is_here = held.get("machine") == self._owner["machine"]
        seconds = _SECONDS_TO_END if is_here else self._seconds_to_expire
        print(
            f"{self._directory} is held by {_name(held)}: waiting {seconds:g} s to see whether that is still alive",
            flush=True,
        )
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            time.sleep(min(1.0, self._seconds_between_beats / 2))
            now = self._read()
            if now is None or is_ended_here(now):
                return
            if now != held and not is_here:
                raise self._taken(now)
        if is_here:
            raise self._taken(held)

    def _renew(self) -> None:
        while not self._stop.wait(self._seconds_between_beats):
            try:
                held = self._read()
                # What is written into a new directory would be checkpoints without their configuration.
                self._is_gone = self._look_for_directory()
                if held is not None and not self._is_mine(held):
                    self._lost_to = held
                if self._is_gone or self._lost_to:  # the run ends as by Ctrl-C
                    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
                    return
                self._beat()
            except OSError:
                continue  # the storage may come back before the lease expires

    def _look_for_directory(self) -> bool:
        """Return whether the directory is gone for good, or was replaced by one that is of nobody.

        A directory that is away, as a disk that is mounted again may be, has as long as an owner without heartbeats.
        """
        if not exists(self._directory):
            self._missing_since = self._missing_since or time.monotonic()
            return time.monotonic() - self._missing_since > self._seconds_to_expire
        self._missing_since = 0.0
        is_claimed = exists(f"{self._directory}/configuration.json")
        self._was_claimed = self._was_claimed or is_claimed
        return self._was_claimed and not is_claimed

    def _beat(self) -> None:
        self._num_beats += 1
        write_json(self._uri, {**self._owner, "num_beats": self._num_beats})

    def _read(self) -> dict[str, Any] | None:
        """Read the lease file; None if there is none, an empty dictionary if it is damaged."""
        try:
            return read_json(self._uri)
        except FileNotFoundError:  # the owner has just released it
            return None
        except ValueError:
            return {}

    def _is_mine(self, held: dict[str, Any]) -> bool:
        return held.get("token") == self._owner["token"]

    def _taken(self, held: dict[str, Any]) -> RunIsTakenError:
        return RunIsTakenError(
            f"the run in {self._directory} is in the hands of {_name(held)}: wait until that has ended, or choose another "
            "run.name"
        )


def _name(held: dict[str, Any]) -> str:
    if "pid" not in held:
        return f"an unknown owner ({LEASE_FILE} is damaged)"
    return f"process {held['pid']} on {held['host']}"


def _machine() -> str:
    """Identify the machine: equal for processes that share process IDs, on one machine and in the same container."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux
        return f"{platform.node()} {uuid.getnode():x}"


def _process(pid: int | None = None) -> dict[str, Any]:
    """Identify a process of this machine, by default this one."""
    number = os.getpid() if pid is None else pid
    return {"pid": number, "start_ticks": _start_ticks(number)}


def _start_ticks(pid: int) -> int | None:
    """Return when a process started, in the kernel's ticks since boot, which no step of the clock changes; None on macOS."""
    with suppress(OSError):
        # The second field is the name in parentheses, which may hold anything; the start is the 22nd (man 5 proc).
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    return None


def is_ended_here(held: dict[str, Any]) -> bool:
    """Return whether a lease is of a process of this machine that has ended; its process ID may belong to another."""
    if held.get("machine") != _machine():
        return False
    try:
        process = psutil.Process(held["pid"])
        return _start_ticks(process.pid) != held["start_ticks"] or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
    except (KeyError, TypeError, ValueError):  # the file is damaged: its owner may live
        return False
