"""The command of a submitted job, and the name that the submission gets from it."""

from __future__ import annotations

import difflib
import hashlib
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jobs.engine.masking import masked

_COMMANDS = Path(__file__).parents[1]
_NOT_SUBMITTED = {"__init__", "submit", "revision"}
_NAME_OPTIONS = ("--run.name", "--base.run.name")
_MAX_NAME = 60


@dataclass(frozen=True, slots=True)
class Entrypoint:
    """A job and its arguments, as they are typed after `--`."""

    module: str
    """Full name of the module that Python runs."""
    arguments: tuple[str, ...]

    @property
    def command(self) -> str:
        """The line that a shell of the cluster runs."""
        return shlex.join(["python", "-m", self.module, *self.arguments])

    @property
    def name(self) -> str:
        """The name of the run if there is one, else the job followed by a digest of its arguments.

        A run has the name of its preset unless an option names it.
        """
        job = self.module.rpartition(".")[2]
        given = [argument.partition("=") for argument in self.arguments]
        for (option, equals, value), following in zip(given, [*self.arguments[1:], ""], strict=True):
            if option.replace("_", "-") in _NAME_OPTIONS:
                return _plain(value if equals else following)
        preset = next(iter(self.arguments), "-")
        if not preset.startswith("-") and (job.startswith("train") or job == "sweep"):
            return _plain(preset)
        digest = hashlib.blake2b(self.command.encode(), digest_size=4).hexdigest()
        return _plain(f"{job.replace('_', '-')}-{digest}")


def parse_entrypoint(words: Sequence[str]) -> Entrypoint:
    """Return the job that the words after `--` name: a command of this project, or a module with its full name.

    Raises:
        ValueError: if no job is named, or none has this name, or a word holds a secret.
    """
    if not words:
        raise ValueError("no job is named: type it after --, for example: -- train_lm gpt2-scratch --run.name mine")
    if secret := next((masked(word) for word in words if masked(word) != word), ""):
        raise ValueError(
            f"{secret} holds a login or secret, which Ray would keep with the job for everyone to read: set it in the "
            "environment of every node, that of MLflow as MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
        )
    job, *arguments = words
    if "." in job and not job.startswith("jobs."):
        return Entrypoint(job, tuple(arguments))
    name = job.removeprefix("jobs.")
    commands = sorted(path.stem for path in _COMMANDS.glob("*.py") if path.stem not in _NOT_SUBMITTED)
    if name not in commands:
        near = difflib.get_close_matches(name, commands, n=3, cutoff=0.4)
        hint = f"did you mean {' or '.join(near)}?" if near else f"there are: {', '.join(commands)}"
        raise ValueError(f"job {job!r} is unknown: {hint}")
    return Entrypoint(f"jobs.{name}", tuple(arguments))


def _plain(name: str) -> str:
    """Return a name with letters, digits, dots, dashes and underscores only, which is safe in an address and a path."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:_MAX_NAME] or "job"
