"""The environment that a job gets on the cluster: variables, packages and code."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jobs.engine.locked import LOCK, LOCKED_VARIABLE
from jobs.engine.revision import VARIABLE, checkout_revision
from jobs.submission.config import RaySubmission


def sent_revision() -> str:
    """Return the revision to tell a job: that of this checkout, or else $TEMPNET_REVISION, which may be empty."""
    return checkout_revision() or os.environ.get(VARIABLE, "").strip()


def sent_variables(names: Sequence[str], *, is_checked: bool) -> dict[str, str]:
    """Return the environment variables that every job gets, and those of this process that `names` lists."""
    variables = {name: os.environ[name] for name in names}
    if revision := sent_revision():
        variables[VARIABLE] = revision
    if is_checked:
        variables[LOCKED_VARIABLE] = "1"
    return variables


def runtime_environment(request: RaySubmission) -> dict[str, Any]:
    """Return Ray's description of the environment that a job is to run in: the code, the packages and the variables."""
    variables = sent_variables(request.variables, is_checked=request.environment != "unchecked")
    variables["RAY_JOB_STOP_WAIT_TIME_S"] = str(request.stop_seconds)
    directory = str(Path(request.working_dir).resolve())
    runtime: dict[str, Any] = {
        "working_dir": directory,
        "excludes": ["/.git", "/.venv", "/tests"],
        "env_vars": variables,
    }
    if request.environment == "pip":
        lines = [line for line in LOCK.read_text().splitlines() if line and not line.startswith("#")]
        # DeepSpeed is built from source, with the torch that is there already and without its own extensions.
        variables["DS_BUILD_OPS"] = "0"
        options = ["--disable-pip-version-check", "--no-build-isolation"]
        runtime["pip"] = {"packages": lines, "pip_check": False, "pip_install_options": options}
    return runtime
