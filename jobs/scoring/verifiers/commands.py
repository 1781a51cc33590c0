"""A verifier that is a command: it reads a sample as JSON, and answers by a number or by its exit status."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Mapping
from typing import Any

from jobs.scoring.verifiers.processes import run_command
from jobs.scoring.verifiers.samples import Sample, VerifierError, as_reward


class CommandVerifier:
    """Runs a command for every sample, which gets the sample on its standard input as one line of JSON.

    If the command prints something, its last line must be the reward, and its exit status 0. If it prints nothing, exit
    status 0 is a reward of 1, and 1 a reward of 0. Every other exit status is a failure.

    Raises:
        ValueError: if there is no such command on this machine.
    """

    def __init__(self, command: str, *, seconds: float) -> None:
        """Split the command line as a shell does; `seconds` is the time limit of a call."""
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

    def check(self, fields: Mapping[str, Any]) -> None:
        """Check nothing: what the command needs is its own affair."""

    def judge(self, sample: Sample) -> float:
        """Run the command on a sample."""
        try:
            done = run_command(
                self._words,
                given=sample.to_json() + "\n",
                seconds=self._seconds,
                directory=None,
                environment=os.environ,
            )
        except OSError as error:
            raise VerifierError("died", f"{self._words[0]} cannot be started: {error}") from error
        if done.status is None:
            raise VerifierError("timed_out", f"{self._words[0]} gave no answer within {self._seconds:g} s")
        if done.status < 0:
            raise VerifierError("died", f"{self._words[0]} was ended by signal {-done.status}")
        lines = done.output.split("\n")
        answer = next((line.strip() for line in reversed(lines) if line.strip()), "")
        if done.status > 1 or (done.status == 1 and answer):
            raise VerifierError("raised", f"{self._words[0]} ended with status {done.status}")
        if not answer:
            return float(done.status == 0)
        try:
            return as_reward(float(answer))
        except ValueError:
            raise VerifierError("not_a_number", f"{self._words[0]} printed {answer!r:.100}") from None

    def close(self) -> None:
        """End nothing: no process outlives its call."""
