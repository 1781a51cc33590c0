"""One driver for a run at a time: a lease in the run's directory, which its owner renews while it lives.

The lease is a file that names its owner and counts heartbeats. Who finds one that is not its own

* goes on at once if the owner was a process of this machine that is gone. If that process lives, it gets some seconds to
  end, as the processes of a job that was killed just now may need them; then the start is refused;
* otherwise (the owner is on another machine, or in another container) watches the count: if it moves, the owner lives; if
  it rests for `seconds_to_expire`, the owner is dead. Nobody's clock is compared with another's.

What it can promise: object stores have no "create unless it is there", so the new owner writes its name, waits, and reads
back whose name stands there. Of two drivers that start together the one that wrote last goes on, provided that each needs
less than `_SECONDS_TO_SETTLE` from reading that the lease is free to having written it. A slower one is found out at the
next heartbeat: the driver whose name was overwritten ends itself. Until then, at most for one interval between heartbeats,
two drivers may train one run. The same holds for a driver that could not reach the storage for longer than the expiry.
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
from pipelines.storage import read_json, resolve, write_json
from pyarrow.fs import LocalFileSystem

LEASE_FILE = "lease.json"

_SECONDS_TO_SETTLE = 0.5
_SECONDS_TO_END = 5.0
_SECONDS_OF_CLOCK_ERROR = 2.0  # of a process's start, which is computed from the time of booting


class RunIsTakenError(ValueError):
    """Another driver has the run."""


class Lease:
    """Held inside its context.

    Args:
        directory: path or URI of the run.
        seconds_between_beats: how often it is renewed.
        seconds_to_expire: after how long without a heartbeat the owner counts as dead.
    """

    def __init__(self, directory: str, *, seconds_between_beats: float = 10.0, seconds_to_expire: float = 60.0) -> None:
        self._directory = directory
        self._uri = f"{directory}/{LEASE_FILE}"
        self._seconds_between_beats, self._seconds_to_expire = seconds_between_beats, seconds_to_expire
        self._owner = {"token": uuid.uuid4().hex, "host": platform.node(), "machine": _machine(), **_process()}
        self._num_beats = 0
        self._lost_to: dict[str, Any] | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)

    def __enter__(self) -> Lease:
        """Take the lease.

        Raises:
            RunIsTakenError: if its owner lives.
        """
        held = self._read()
        if held is not None and not _is_ended_here(held):
            self._wait_until_dead(held)
        filesystem, path = resolve(self._directory)
        filesystem.create_dir(path, recursive=True)
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
        """Give it up.

        Raises:
            RunIsTakenError: if somebody else took it, for which the block was interrupted.
        """
        self._stop.set()
        self._thread.join()
        if self._lost_to is not None:
            raise self._taken(self._lost_to) from error
        with suppress(OSError):  # it expires by itself
            if self._is_mine(self._read() or {}):
                filesystem, path = resolve(self._uri)
                filesystem.delete_file(path)
                if isinstance(filesystem, LocalFileSystem):
                    Path(path).parent.rmdir()  # so that a run which could not start leaves nothing

    def _wait_until_dead(self, held: dict[str, Any]) -> None:
        is_here = held.get("machine") == self._owner["machine"]
        seconds = _SECONDS_TO_END if is_here else self._seconds_to_expire
        print(f"{self._directory} is held by {_name(held)}: looking for {seconds:g} s whether that lives", flush=True)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            time.sleep(min(1.0, self._seconds_between_beats / 2))
            now = self._read()
            if now is None or _is_ended_here(now):
                return
            if now != held and not is_here:
                raise self._taken(now)
        if is_here:
            raise self._taken(held)

    def _renew(self) -> None:
        while not self._stop.wait(self._seconds_between_beats):
            try:
                held = self._read()
                if held is not None and not self._is_mine(held):
                    self._lost_to = held
                    main = threading.main_thread().ident
                    assert main is not None
                    signal.pthread_kill(main, signal.SIGINT)  # ends the run as Ctrl-C does
                    return
                self._beat()
            except OSError:
                continue  # the storage may come back before the lease expires

    def _beat(self) -> None:
        self._num_beats += 1
        write_json(self._uri, {**self._owner, "num_beats": self._num_beats})

    def _read(self) -> dict[str, Any] | None:
        """What the file says; nothing of its owner if it is damaged."""
        try:
            return read_json(self._uri)
        except FileNotFoundError:  # just given up
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
    """Equal for processes that see each other by their numbers: on one machine, outside of or inside one container."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux
        return f"{platform.node()} {uuid.getnode():x}"


def _process() -> dict[str, Any]:
    return {"pid": os.getpid(), "started": psutil.Process().create_time()}


def _is_ended_here(held: dict[str, Any]) -> bool:
    """Whether the owner was a process of this machine that is gone, its number free or another's."""
    if held.get("machine") != _machine():
        return False
    try:
        process = psutil.Process(held["pid"])
        is_another = abs(process.create_time() - held["started"]) > _SECONDS_OF_CLOCK_ERROR
        return is_another or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
