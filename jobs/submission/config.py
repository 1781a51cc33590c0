"""What a user can set about a submission, and what is refused before anything is sent."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from jobs.engine.checks import check_not_negative, check_positive
from jobs.engine.masking import masked

_SECRET_WORDS = ("TOKEN", "SECRET", "PASSWORD", "PASSWD", "ACCESS_KEY", "API_KEY", "PRIVATE_KEY", "CREDENTIAL")


def check_variables(names: tuple[str, ...]) -> None:
    """Check environment variables that are to be sent with a job.

    Ray keeps them with the job, where everyone who may list its jobs can read them, so that secrets are refused.

    Raises:
        ValueError: if a variable is not set, or its name or value tells that it holds a secret.
    """
    for name in names:
        if name not in os.environ:
            raise ValueError(f"variables = {name!r} is not set here: give the names of environment variables that are")
        if any(word in name.upper() for word in _SECRET_WORDS) or masked(os.environ[name]) != os.environ[name]:
            raise ValueError(
                f"variables = {name!r} holds a secret, which Ray would keep with the job for everyone to read: set it in "
                "the environment of every node, on Kubernetes by a Secret (--secret-name)"
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
        """`address`, or else that of the environment.

        Raises:
            ValueError: if there is none.
        """
        for address in (self.address, os.environ.get("RAY_API_SERVER_ADDRESS"), os.environ.get("RAY_ADDRESS")):
            if address:
                return address
        raise ValueError("address = '' names no cluster: give --address http://head:8265, or set RAY_ADDRESS")
