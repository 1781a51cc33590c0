"""Verifiers that run programs: a command, a Python function in a process that can be ended, or the unit tests of a prompt.

The process of a function is `python -m jobs.scoring.verifiers.programs MODULE:FUNCTION SOCKET`. It reads a sample as JSON,
one a line, and answers with one line: `value`, what the function returned, and `problem`, which is empty unless it raised
an exception. A first line says the same of its import, with the file as `value`. It ends with the process that started it,
also from within a function that hangs.

Generated code and its unit tests, which reach it through a connection (`code_process.py`), each have a process in namespaces
of its own: no network, no process, file or socket of this machine but Python itself, which can only be read, and a scratch
directory in memory. Where the kernel allows no namespaces, nothing is run unless the settings allow it.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Any

import psutil

from jobs.scoring.verifiers import code_process
from jobs.scoring.verifiers.verifier import Sample, Verifier, VerifierError, VerifierSection, as_reward

FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
"""A function by its name, MODULE:FUNCTION."""
# Of what a command prints, this many bytes at the end are read; a broken one that prints more than the maximum is ended.
_MAX_READ, _MAX_OUTPUT = 4096, 64 << 20
_FIRST_WAIT, _LONGEST_WAIT, _SECONDS_BETWEEN_QUESTIONS = 0.001, 0.02, 0.1
_SECONDS_TO_START = 120.0  # the module of a function may load large packages
_SECONDS_BETWEEN_LOOKS = 1.0


class CommandVerifier(Verifier):
    """Runs a command for every sample, which gets the sample on its standard input as one line of JSON.

    If the command prints something, its last line must be the reward, and its exit status 0. If it prints nothing, exit
    status 0 is a reward of 1, and 1 a reward of 0. Every other exit status is a failure.
    """

    def __init__(self, command: str, *, seconds: float) -> None:
        try:
            self._words = shlex.split(command)
        except ValueError as error:
            raise ValueError(f"verifier.name = {command!r} is no command line: {error}") from error
        self._seconds = seconds
        if not self._words or shutil.which(self._words[0]) is None:
            raise ValueError(
                f"verifier.name = {command!r} is none of exact, gsm8k and unit-tests, no function MODULE:FUNCTION, and no "
                "command of this machine"
            )

    def files(self) -> list[Path]:
        return [path for word in self._words if (path := Path(word)).is_file()]

    def judge(self, sample: Sample) -> float:
        name = self._words[0]
        # Input and output are files and not pipes, so that neither side can wait for the other.
        with tempfile.TemporaryFile() as source, tempfile.TemporaryFile() as target:
            source.write(sample.to_json().encode() + b"\n")
            source.seek(0)
            try:
                process = subprocess.Popen(
                    self._words, stdin=source, stdout=target, stderr=subprocess.DEVNULL, start_new_session=True
                )
            except OSError as error:
                raise VerifierError("died", f"{name} cannot be started: {error}") from error
            try:
                in_time = wait_for_end(process, self._seconds, lambda: os.fstat(target.fileno()).st_size <= _MAX_OUTPUT)
            finally:
                kill_session(process)
            size = target.seek(0, os.SEEK_END)
            target.seek(max(0, size - _MAX_READ))
            answer = target.read().decode(errors="replace").strip().rpartition("\n")[2].strip()
        if not in_time:
            raise VerifierError(
                "timed_out", f"{name} gave no answer within {self._seconds:g} s and {_MAX_OUTPUT >> 20} MiB"
            )
        if (status := process.returncode) < 0:
            raise VerifierError("died", f"{name} was ended by signal {-status}")
        if status > 1 or (status == 1 and answer):
            raise VerifierError("raised", f"{name} ended with status {status}")
        if not answer:
            return float(status == 0)
        try:
            return as_reward(float(answer))
        except ValueError:
            raise VerifierError("not_a_number", f"{name} printed {answer!r:.100}") from None


class FunctionVerifier(Verifier):
    """Calls `function(sample)` with the plain values of a sample (`Sample.to_json`), which returns its reward.

    After a sample that hangs or ends the process, the next one starts a new process.
    """

    def __init__(self, name: str, *, seconds: float) -> None:
        self._name, self._seconds = name, seconds
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        if self._process is not None:
            return
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "jobs.scoring.verifiers.programs", self._name, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                # The function is found where this process would find it, also in a worker of Ray.
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._answers = self._socket.makefile("r", encoding="utf-8")
        try:
            answer = self._read(_SECONDS_TO_START)
            problem, self._file = answer["problem"], answer["value"]
        except VerifierError as error:
            problem = str(error)
        if problem:
            self.close()
            raise ValueError(f"verifier.name = {self._name}: {problem}")

    def files(self) -> list[Path]:
        return [Path(self._file)] if self._file and Path(self._file).is_file() else []

    def judge(self, sample: Sample) -> float:
        line = sample.to_json().encode() + b"\n"
        try:
            self.start()
            self._socket.sendall(line)
            answer = self._read(self._seconds)
        except VerifierError:
            self.close()
            raise
        except (ValueError, OSError) as error:
            self.close()
            raise VerifierError("died", f"the process of {self._name} ended: {error}") from error
        if answer["problem"]:
            raise VerifierError("raised", answer["problem"])
        return as_reward(answer["value"])

    def _read(self, seconds: float) -> Any:
        """Return the next line of the process; raises VerifierError if there is none in time."""
        self._socket.settimeout(seconds)
        try:
            line = self._answers.readline()
        except TimeoutError:
            raise VerifierError("timed_out", f"{self._name} gave no answer within {seconds:g} s") from None
        if not line.endswith("\n"):
            raise VerifierError("died", f"the process of {self._name} ended without an answer")
        return json.loads(line)

    def close(self) -> None:
        if self._process is not None:
            kill_session(self._process)
            self._answers.close()
            self._socket.close()
            self._process = None


def wait_for_end(process: subprocess.Popen[bytes], seconds: float, goes_on: Callable[[], bool] = lambda: True) -> bool:
    """Wait until a process has ended, or `goes_on`, which is asked ten times a second, says no; return whether it has ended.

    It is not reaped: that would give its number back, and :func:`kill_session` could hit another one's session.
    """
    now = time.monotonic()
    deadline, next_look, pause = now + seconds, now, _FIRST_WAIT
    while os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
        now = time.monotonic()
        if now > deadline or (now >= next_look and not goes_on()):
            return False
        if now >= next_look:
            next_look = now + _SECONDS_BETWEEN_QUESTIONS
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_WAIT)
    return True


def kill_session(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that leads a session, with what it has started in this session, and reap it."""
    if process.returncode is None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        for number in psutil.pids():  # those in groups of their own, such as `timeout` makes
            with suppress(ProcessLookupError, PermissionError):
                if os.getsid(number) == process.pid:
                    os.kill(number, signal.SIGKILL)
        process.wait()


def serve(name: str, descriptor: int) -> None:
    """Import the function MODULE:FUNCTION and answer samples, which come from a socket, until that is closed."""
    threading.Thread(target=_end_with_parent, args=[os.getppid()], daemon=True).start()
    with socket.socket(fileno=descriptor) as connection, connection.makefile("r", encoding="utf-8") as samples:

        def answer(value: Any = None, problem: str = "") -> None:
            connection.sendall(json.dumps({"value": value, "problem": problem}).encode() + b"\n")

        module, _, attribute = name.partition(":")
        try:
            function = getattr(importlib.import_module(module), attribute)
            if not callable(function):
                raise TypeError(f"{attribute} is a {type(function).__name__} and no function")
        except Exception as error:
            answer(problem=_describe(error))
            return
        answer(getattr(sys.modules[module], "__file__", None))
        for line in samples:
            try:
                value = function(json.loads(line))
                number = hasattr(value, "__float__") and not isinstance(value, str)
                answer(float(value) if number else repr(value)[:100])
            except Exception as error:
                answer(problem=_describe(error))


def _end_with_parent(parent: int) -> None:
    """End this process once it has another parent than the given one, which has died then."""
    while os.getppid() == parent:
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    os._exit(1)


def _describe(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


_FENCED = re.compile(r"```(?:python3?|py)?[ \t\r]*\n(.*?)```", re.DOTALL | re.IGNORECASE)
# Namespaces of users, files, network, System V memory, names and processes; without rights, as the same user.
_UNSHARE = (
    "unshare", "--user", "--map-root-user", "--mount", "--net", "--ipc", "--uts", "--pid", "--fork", "--kill-child",
)  # fmt: skip


class UnitTests(Verifier):
    """1 for a text whose code passes the statements `tests` of its prompt, else 0; code that hangs or dies has failed.

    The code is the last block between ``` in the text, else the whole text. It passes if the end of the tests is reached.
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
        settings, usage = self._settings, [measure(process.pid) for process in processes]
        seconds, num_bytes, numbers = zip(*usage, strict=True)
        return (
            sum(seconds) <= settings.seconds + 1.0
            and sum(num_bytes) <= settings.memory_mib << 20
            # Of each, two are unshare and the interpreter.
            and sum(max(0, number - 2) for number in numbers) <= settings.num_processes
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
    # Python and the programs of this machine are in these places.
    system = ["/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/alternatives"]
    own = {sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix}
    limits = {
        "root": scratch if is_isolated else "",
        "readable": system + sorted(place for place in own if not place.startswith("/usr/") and place != "/usr"),
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


def measure(process: int) -> tuple[float, int, int]:
    """Return what a process and all that it has started use: seconds (of those that have ended, too), bytes, processes."""
    seconds, num_bytes, number = 0.0, 0, 0
    with suppress(psutil.Error):
        top = psutil.Process(process)
        for one in [top, *top.children(recursive=True)]:
            with suppress(psutil.Error), one.oneshot():
                seconds += sum(one.cpu_times()[:4])
                num_bytes += one.memory_info().rss
                number += 1
    return seconds, num_bytes, number


def _statements(tests: Any) -> str:
    if isinstance(tests, str) and tests.strip():
        return tests
    if isinstance(tests, list) and tests and all(isinstance(test, str) for test in tests):
        return "\n".join(tests)
    raise ValueError(
        "verifier.name = unit-tests runs `tests`, a string or a list of strings of Python, which is missing"
    )


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
