"""Tags of an MLflow run: what it was made from, and who started it, with which command and from which code."""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import sys
from typing import Any

import ray

from jobs.engine.config import TrackingSection
from jobs.engine.identity import configuration_hash
from jobs.engine.revision import revision_tags

JOB_TAG = "ray_job_id"
"""Tag with the IDs of the Ray jobs that a run was trained in."""
# Environment variable by which Ray describes a submitted job to its driver, in JSON.
_SUBMITTED_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"


def run_tags(config: Any, tracking: TrackingSection) -> dict[str, str]:
    """Return tags by which a run can be found: configuration hash, preset and table of a paper; empty tags are omitted.

    Args:
        config: the configuration of the run, a dataclass.
        tracking: the tracking section of the configuration.
    """
    tags = {
        "configuration_hash": configuration_hash(config),
        "preset": tracking.preset,
        "paper.table": tracking.paper,
    }
    return {name: value for name, value in tags.items() if value}


def ray_job_id() -> str:
    """Return the ID of the Ray job whose driver this process is; empty if Ray is not running.

    For a job started by `ray job submit` this is its submission ID, else Ray's internal job ID.
    """
    submitted = json.loads(os.environ.get(_SUBMITTED_JOB, "{}")).get("metadata", {})
    if name := submitted.get("job_submission_id", ""):
        return str(name)
    return str(ray.get_runtime_context().get_job_id()) if ray.is_initialized() else ""


def origin_tags() -> dict[str, str]:
    """Return tags that say who started a run, with which command, in which Ray job and from which revision of the code.

    Must be called in the process that started the job; what is unknown is omitted.
    """
    tags = revision_tags()
    if ray_job := ray_job_id():
        tags[JOB_TAG] = ray_job
    with contextlib.suppress(OSError, KeyError):  # in a container the user ID may have no name
        tags["mlflow.user"] = getpass.getuser()
    module = getattr(sys.modules["__main__"], "__spec__", None)
    if module is not None and module.name.startswith("jobs."):
        tags |= {"mlflow.source.name": module.name, "mlflow.source.type": "JOB"}
    return tags
