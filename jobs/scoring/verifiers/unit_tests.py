"""The verifier of code: the unit tests of a prompt, run with the generated code in a subprocess with limits.

The limits hold what generated code does by mistake: time, CPU time, memory, size of files, processes left behind. Where
the kernel allows it, the code also has no network and sees no other process. It can still read what this user can read.
Code that is out to do harm belongs into a container or a machine of its own.
"""

from __future__ import annotations

import functools
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jobs.scoring.verifiers.processes import run_command
from jobs.scoring.verifiers.samples import Sample, VerifierError

_FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)
# A network and processes of its own; without rights, as the same user.
_UNSHARE = ("unshare", "--user", "--map-current-user", "--net", "--pid", "--fork", "--kill-child")
# Limits that a shell sets can be raised by nobody below it: CPU time in s, memory in KiB, files in blocks of 512 bytes.
_LIMITED = 'ulimit -t "$1"; ulimit -v "$2"; ulimit -f "$3"; ulimit -c 0; shift 3; exec "$@"'


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the code of a sample may use."""

    seconds: float = 10.0
    """Time, and CPU time of each process."""
    memory_mib: int = 1024
    """Address space of each process."""
    file_mib: int = 16
    """Size of each file that it writes, also of its output."""


class UnitTests:
    """1 for a text whose code passes the statements `tests` of its prompt, else 0; code that hangs or dies has failed.

    The code is the last block between ``` in the text, else the whole text. It passes if the end of the tests is
    reached: a program that ends itself before, with whatever status, has failed.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits

    def check(self, fields: Mapping[str, Any]) -> None:
        """Check that the prompt has statements `tests` that can be parsed: a string, or a list of strings."""
        try:
            compile(_statements(fields.get("tests")), "tests", "exec")
        except SyntaxError as error:
            raise ValueError(f"verifier.name = unit-tests: `tests` cannot be parsed: {error}") from error

    def judge(self, sample: Sample) -> float:
        """Run the code and its tests."""
        blocks = _FENCED.findall(sample.text)
        # The word that shows that the end was reached. The code cannot know it, because it is drawn for this call.
        word = secrets.token_hex(16)
        end = f"import sys\nsys.stdout.write({chr(10) + word!r})\n"
        tests = _statements(sample.fields["tests"])
        program = "\n\n".join([blocks[-1] if blocks else sample.text, tests, end])
        limits = self._limits
        numbers = (int(limits.seconds) + 1, limits.memory_mib << 10, limits.file_mib << 11)
        python = (sys.executable, "-I", "-B", "-")
        with tempfile.TemporaryDirectory(prefix="tempnet-code-", ignore_cleanup_errors=True) as directory:
            try:
                done = run_command(
                    [*isolation(), "sh", "-c", _LIMITED, "sh", *map(str, numbers), *python],
                    given=program,
                    seconds=limits.seconds,
                    directory=directory,
                    # No variable of this process, which may hold passwords.
                    environment={
                        "PATH": "/usr/bin:/bin",
                        "HOME": directory,
                        "TMPDIR": directory,
                        "OMP_NUM_THREADS": "1",
                    },
                )
            except (OSError, UnicodeEncodeError) as error:
                raise VerifierError("died", f"the code cannot be run: {error}") from error
        return float(done.status == 0 and done.output.endswith(word))

    def close(self) -> None:
        """End nothing: no process outlives its call."""


@functools.cache
def isolation() -> tuple[str, ...]:
    """Return the command that takes network and other processes away; empty if this machine's kernel does not allow it."""
    if shutil.which(_UNSHARE[0]) is None:
        return ()
    done = subprocess.run([*_UNSHARE, "true"], stdin=subprocess.DEVNULL, capture_output=True, timeout=30)
    return _UNSHARE if done.returncode == 0 else ()


def _statements(tests: Any) -> str:
    if isinstance(tests, str) and tests.strip():
        return tests
    if isinstance(tests, list) and tests and all(isinstance(test, str) for test in tests):
        return "\n".join(tests)
    raise ValueError(
        "verifier.name = unit-tests runs `tests`, a string or a list of strings of Python, which is missing"
    )
