"""The verifier of code: the unit tests of a prompt, which reach the generated code through a connection (`code_process.py`).

Code and tests each have a process in namespaces of its own: no network, no process, file or socket of this machine but
Python itself, which can only be read, and a scratch directory in memory. Limits hold for all processes of a sample
together. Where the kernel allows no namespaces, nothing is run unless the settings allow it.
"""

from __future__ import annotations

import functools
import json
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import IO, Any, NamedTuple

import psutil

from jobs.scoring.verifiers import code_process
from jobs.scoring.verifiers.programs import kill_session, wait_for_end
from jobs.scoring.verifiers.verifier import Sample, Verifier, VerifierError, VerifierSection

_FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)
# Namespaces of users, files, network, System V memory, names and processes; without rights, as the same user.
_UNSHARE = (
    "unshare", "--user", "--map-root-user", "--mount", "--net", "--ipc", "--uts", "--pid", "--fork", "--kill-child",
)  # fmt: skip


class UnitTests(Verifier):
    """1 for a text whose code passes the statements `tests` of its prompt, else 0; code that hangs or dies has failed.

    The code is the last block between ``` in the text, else the whole text. It passes if the end of the tests is reached:
    tests or code that end their process before have failed. What may pass between the two says `code_process.py`.
    """

    def __init__(self, settings: VerifierSection) -> None:
        self._settings = settings

    def check(self, fields: Mapping[str, Any]) -> None:
        """Check that the prompt has statements `tests` that can be parsed, and that their code can be isolated."""
        try:
            compile(_statements(fields.get("tests")), "tests", "exec")
        except SyntaxError as error:
            raise ValueError(f"verifier.name = unit-tests: `tests` cannot be parsed: {error}") from error
        if not self._settings.allow_unisolated and (problem := isolation_problem(shutil.which("unshare"))):
            raise ValueError(
                f"verifier.name = unit-tests: generated code cannot be isolated on this machine: {problem}. It could read "
                "and write what you may, also your keys: allow user namespaces, or in a container or machine of its own give "
                "--verifier.allow-unisolated"
            )

    def judge(self, sample: Sample) -> float:
        is_isolated = not isolation_problem(shutil.which("unshare"))
        if not is_isolated and not self._settings.allow_unisolated:
            raise VerifierError("died", "generated code cannot be isolated on this machine")
        blocks = _FENCED.findall(sample.text)
        sources = {"code": blocks[-1] if blocks else sample.text, "tests": _statements(sample.fields["tests"])}
        processes: list[subprocess.Popen[bytes]] = []
        with ExitStack() as stack:
            ends = [stack.enter_context(end) for end in socket.socketpair()]
            try:
                for (role, source), end in zip(sources.items(), ends, strict=True):
                    scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="tempnet-code-"))
                    given = stack.enter_context(tempfile.TemporaryFile())
                    given.write(source.encode())
                    given.seek(0)
                    processes.append(_start(role, given, scratch, self._settings, is_isolated, end))
                    stack.callback(kill_session, processes[-1])
            except (OSError, UnicodeEncodeError) as error:
                raise VerifierError("died", f"the code cannot be run: {error}") from error
            for end in ends:
                end.close()  # else the tests would wait for code that has ended
            is_over = wait_for_end(processes[1], self._settings.seconds, lambda: self._is_within_limits(processes))
        return float(is_over and processes[1].returncode == 0)

    def _is_within_limits(self, processes: Sequence[subprocess.Popen[bytes]]) -> bool:
        """Return whether processes, with all that they have started, are together within the limits of a sample."""
        settings, usage = self._settings, [measure(process.pid) for process in processes]
        return (
            sum(used.seconds for used in usage) <= settings.seconds + 1.0
            and sum(used.num_bytes for used in usage) <= settings.memory_mib << 20
            # Of each, two are unshare and the interpreter.
            and sum(max(0, used.num_processes - 2) for used in usage) <= settings.num_processes
        )


@functools.cache
def isolation_problem(unshare: str | None) -> str:
    """Return why this machine cannot isolate code, in a line, or nothing if it can."""
    if unshare is None:
        return "there is no command unshare (of util-linux)"
    with tempfile.TemporaryDirectory(prefix="tempnet-code-") as scratch, tempfile.TemporaryFile() as said:
        process = _start("probe", None, scratch, VerifierSection(name="unit-tests"), True, None, said)
        try:
            wait_for_end(process, 60.0)
        finally:
            kill_session(process)
        said.seek(0)
        lines = said.read().decode(errors="replace").strip().splitlines()
    return "" if process.returncode == 0 else (lines or ["it gave no answer"])[-1]


def _start(
    role: str,
    source: IO[bytes] | None,
    scratch: str,
    settings: VerifierSection,
    is_isolated: bool,
    end: socket.socket | None,
    errors: IO[bytes] | None = None,
) -> subprocess.Popen[bytes]:
    """Start a process of `code_process.py` in a session of its own, which sees no variable of this one."""
    limits = {
        "root": scratch if is_isolated else "",
        "readable": _readable(),
        "seconds": settings.seconds,
        "memory_bytes": settings.memory_mib << 20,
        "file_bytes": settings.file_mib << 20,
        "num_processes": settings.num_processes + 1,
    }
    descriptors = [end.fileno()] if end else []
    return subprocess.Popen(
        [
            *(_UNSHARE if is_isolated else ()),
            *(sys.executable, "-I", "-B", code_process.__file__, role, json.dumps(limits), *map(str, descriptors)),
        ],
        stdin=source or subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=errors or subprocess.DEVNULL,
        cwd=scratch,
        env={
            "PATH": "/usr/bin:/bin",
            "HOME": code_process.PLACE if is_isolated else scratch,
            "TMPDIR": code_process.PLACE if is_isolated else scratch,
            "OMP_NUM_THREADS": "1",
        },
        pass_fds=descriptors,
        start_new_session=True,
    )


def _readable() -> list[str]:
    """Return the places that Python and the programs of this machine are in."""
    system = ["/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/alternatives"]
    own = {sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix}
    return system + sorted(place for place in own if not place.startswith("/usr/") and place != "/usr")


class Usage(NamedTuple):
    """What a process and all that it has started use."""

    seconds: float
    """CPU time, also of those that have ended and been waited for."""
    num_bytes: int
    """Memory that is resident; what several share counts several times."""
    num_processes: int


def measure(process: int) -> Usage:
    """Return what a process and all that it has started use; nothing if it has ended."""
    seconds, num_bytes, number = 0.0, 0, 0
    with suppress(psutil.Error):
        top = psutil.Process(process)
        for one in [top, *top.children(recursive=True)]:
            with suppress(psutil.Error), one.oneshot():
                seconds += sum(one.cpu_times()[:4])
                num_bytes += one.memory_info().rss
                number += 1
    return Usage(seconds, num_bytes, number)


def _statements(tests: Any) -> str:
    if isinstance(tests, str) and tests.strip():
        return tests
    if isinstance(tests, list) and tests and all(isinstance(test, str) for test in tests):
        return "\n".join(tests)
    raise ValueError(
        "verifier.name = unit-tests runs `tests`, a string or a list of strings of Python, which is missing"
    )
