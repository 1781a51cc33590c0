"""Run a short command with a time limit, and leave none of its processes behind."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

# Characters of the output that are read: an answer is short, and what a broken command prints may be endless.
_MAX_OUTPUT = 4096
_FIRST_WAIT, _LONGEST_WAIT = 0.001, 0.02


@dataclass(frozen=True, slots=True)
class Finished:
    """How a command ended."""

    status: int | None
    """Exit status, negative if a signal ended it; None if it was killed because its time was over."""
    output: str
    """The end of what it wrote to its standard output."""


def run_command(
    command: Sequence[str], *, given: str, seconds: float, directory: str | None, environment: Mapping[str, str]
) -> Finished:
    """Run a command in a session of its own, whose processes are killed when it ends or its time is over.

    Input and output are files and not pipes, so that neither side can wait for the other.

    Args:
        command: program and arguments.
        given: its standard input.
        seconds: time that it may take, in seconds.
        directory: its working directory; None: that of this process.
        environment: its environment variables.

    Raises:
        OSError: if the command cannot be started.
    """
    with tempfile.TemporaryFile() as source, tempfile.TemporaryFile() as target:
        source.write(given.encode())
        source.seek(0)
        process = subprocess.Popen(
            command,
            stdin=source,
            stdout=target,
            stderr=subprocess.DEVNULL,
            cwd=directory,
            env=dict(environment),
            start_new_session=True,
        )
        try:
            in_time = wait_for_end(process, seconds)
        finally:
            kill_session(process)
        size = target.seek(0, os.SEEK_END)
        target.seek(max(0, size - _MAX_OUTPUT))
        output = target.read().decode(errors="replace")
    return Finished(process.returncode if in_time else None, output)


def wait_for_end(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Wait until a process has ended, without reaping it, and return whether it did within the given time.

    A process that has been reaped gives its number back, and :func:`kill_session` could hit another one's session.
    """
    deadline, pause = time.monotonic() + seconds, _FIRST_WAIT
    while os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_WAIT)
    return True


def kill_session(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that leads a session, with what it has started in this session, and reap it."""
    if process.returncode is None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
