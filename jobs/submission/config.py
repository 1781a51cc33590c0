"""What a user can set about a submission, what is refused before anything is sent, and what a job gets."""

from __future__ import annotations

import difflib
import hashlib
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from jobs.engine.fields import check_not_negative, check_positive
from jobs.engine.masking import masked
from jobs.engine.revision import LOCK, LOCKED_VARIABLE, VARIABLE, checkout_revision

_COMMANDS = Path(__file__).parents[1]
_NOT_SUBMITTED = {"__init__", "submit", "revision"}
_NAME_OPTIONS = ("--run.name", "--base.run.name")
_MAX_NAME = 60
_SECRET_WORDS = ("TOKEN", "SECRET", "PASSWORD", "PASSWD", "ACCESS_KEY", "API_KEY", "PRIVATE_KEY", "CREDENTIAL")


def check_variables(names: tuple[str, ...]) -> None:
    """Check environment variables that are to be sent with a job: that they are set, and tell of no secret."""
    for name in names:
        if name not in os.environ:
            raise ValueError(f"variables = {name!r} is not set here: give the names of environment variables that are")
        if any(word in name.upper() for word in _SECRET_WORDS) or masked(os.environ[name]) != os.environ[name]:
            raise ValueError(
                f"variables = {name!r} holds a secret, which Ray would keep with the job for everyone to read: set it in "
                "the environment of every node, on Kubernetes by a Secret (infra/kubernetes/base/ray-cluster.yaml)"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RaySubmission:
    """Submit a job to a running Ray cluster, follow its log, and exit with its status. What follows `--` is the job."""

    address: str = ""
    """Address of the cluster's job server, for example http://head:8265. If empty: $RAY_API_SERVER_ADDRESS, else
    $RAY_ADDRESS."""
    name: str = ""
    """Submission ID of the job. If empty: the name of the run. A further submission of the same name gets a number."""
    working_dir: str = "."
    """Directory whose files Ray copies to the nodes, without what its .gitignore names. Jobs run in the copy."""
    environment: Literal["nodes", "pip", "unchecked"] = "nodes"
    """Where the packages come from. nodes: from the nodes, and the job refuses to run if a version differs from
    requirements.lock. pip: Ray installs requirements.lock on every node. unchecked: from the nodes, whatever they are."""
    variables: tuple[str, ...] = ()
    """Names of environment variables of this process to set for the job as well. Not for secrets."""
    max_resubmissions: int = 3
    """How many times the job is submitted again after the cluster lost it. Not if the job itself fails."""
    max_wait_minutes: float = 60.0
    """Minutes to wait for a cluster that does not answer before giving up."""
    stop_seconds: int = 60
    """Seconds that the job may take to stop after Ctrl-C or SIGTERM before Ray kills it."""
    detach: bool = False
    """Return after the submission, without following the job."""

    def __post_init__(self) -> None:
        check_not_negative("submit", self, "max_resubmissions")
        check_positive("submit", self, "max_wait_minutes", "stop_seconds")
        if not Path(self.working_dir).is_dir():
            raise ValueError(
                f"working_dir = {self.working_dir!r} is no directory: give the one with the code of the job"
            )
        if self.address and "://" not in self.address:
            raise ValueError(
                f"address = {self.address!r} must begin with http:// or https://, as http://head:8265 does"
            )
        if masked(self.address) != self.address:
            raise ValueError(
                f"address = {masked(self.address)!r} must not hold a login: Ray's token is in RAY_AUTH_TOKEN"
            )
        check_variables(self.variables)

    @property
    def resolved_address(self) -> str:
        """`address`, or else that of the environment; ValueError if there is none."""
        for address in (self.address, os.environ.get("RAY_API_SERVER_ADDRESS"), os.environ.get("RAY_ADDRESS")):
            if address:
                return address
        raise ValueError("address = '' names no cluster: give --address http://head:8265, or set RAY_ADDRESS")

    def runtime_environment(self) -> dict[str, Any]:
        """Return Ray's description of the environment that the job is to run in: code, packages and variables."""
        variables = variables_of_job(self.variables, is_checked=self.environment != "unchecked")
        variables["RAY_JOB_STOP_WAIT_TIME_S"] = str(self.stop_seconds)
        runtime: dict[str, Any] = {
            "working_dir": str(Path(self.working_dir).resolve()),
            "excludes": ["/.git", "/.venv", "/tests"],
            "env_vars": variables,
        }
        if self.environment == "pip":
            lines = [line for line in LOCK.read_text().splitlines() if line and not line.startswith("#")]
            # DeepSpeed is built from source, with the torch that is there already and without its own extensions.
            variables["DS_BUILD_OPS"] = "0"
            options = ["--disable-pip-version-check", "--no-build-isolation"]
            runtime["pip"] = {"packages": lines, "pip_check": False, "pip_install_options": options}
        return runtime


def sent_revision() -> str:
    """Return the revision to tell a job: that of this checkout, or else $TEMPNET_REVISION, which may be empty."""
    return checkout_revision() or os.environ.get(VARIABLE, "").strip()


def variables_of_job(names: tuple[str, ...], *, is_checked: bool = True) -> dict[str, str]:
    """Return the variables that a job gets: those of `names`, its revision, and whether it checks its packages."""
    variables = {name: os.environ[name] for name in names}
    if revision := sent_revision():
        variables[VARIABLE] = revision
    return variables | ({LOCKED_VARIABLE: "1"} if is_checked else {})


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
        """The name of the run, by default its preset, if there is one; else the job followed by a digest of its arguments."""
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
    """Return the job that the words after `--` name: a command of this project, or a module with its full name."""
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
