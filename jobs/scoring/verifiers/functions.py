"""A verifier that is a Python function, in a process of its own, so that one that hangs can be ended."""

from __future__ import annotations

import json
import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from jobs.scoring.verifiers.processes import kill_session
from jobs.scoring.verifiers.samples import Sample, VerifierError, as_reward

FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
"""A function by its name, MODULE:FUNCTION."""
_SERVER = "jobs.scoring.verifiers.function_server"
# Seconds for importing the module of the function, which may load large packages.
_SECONDS_TO_START = 120.0
_MAX_ANSWER = 1 << 16


class FunctionVerifier:
    """Calls `function(sample)` with the plain values of a sample (`Sample.values`), which returns its reward.

    Calls and answers are lines of JSON. A function that raises an exception goes on with the next sample; after one that
    hangs or ends its process, the next sample starts a new process.
    """

    def __init__(self, name: str, *, seconds: float) -> None:
        """Keep the name MODULE:FUNCTION and the time limit of a call; the process starts with the first call."""
        self._name, self._seconds = name, seconds
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process, unless it runs.

        Raises:
            ValueError: if the function cannot be imported; the message says why.
        """
        if self._process is not None:
            return
        self._process = subprocess.Popen(
            [sys.executable, "-m", _SERVER, self._name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            # The function is found where this process would find it, also in a worker of Ray.
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
            start_new_session=True,
        )
        try:
            problem = self._read(_SECONDS_TO_START)["problem"]
        except VerifierError as error:
            problem = str(error)
        if problem:
            self.close()
            raise ValueError(f"verifier.name = {self._name}: {problem}")

    def check(self, fields: Mapping[str, Any]) -> None:
        """Check nothing: what the function needs is its own affair."""

    def judge(self, sample: Sample) -> float:
        """Call the function."""
        try:
            self.start()
        except ValueError as error:
            raise VerifierError("died", str(error)) from error
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(sample.to_json().encode() + b"\n")
            self._process.stdin.flush()
            answer = self._read(self._seconds)
        except OSError as error:
            self.close()
            raise VerifierError("died", f"the process of {self._name} ended: {error}") from error
        except VerifierError:
            self.close()
            raise
        if answer["problem"]:
            raise VerifierError("raised", answer["problem"])
        return as_reward(answer["value"])

    def _read(self, seconds: float) -> dict[str, Any]:
        """Return the next line of the process; raises VerifierError if there is none in time."""
        assert self._process is not None
        assert self._process.stdout is not None
        descriptor, line, deadline = self._process.stdout.fileno(), b"", time.monotonic() + seconds
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise VerifierError("timed_out", f"{self._name} gave no answer within {seconds:g} s")
            part = os.read(descriptor, _MAX_ANSWER)
            if not part:
                raise VerifierError("died", f"the process of {self._name} ended without an answer")
            line += part
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """Kill the process, with what it has started."""
        if self._process is not None:
            kill_session(self._process)
            for pipe in (self._process.stdin, self._process.stdout):
                assert pipe is not None
                pipe.close()
            self._process = None
