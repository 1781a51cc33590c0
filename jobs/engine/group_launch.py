"""Runs several plans side by side in one group of workers; what each run leaves is what it would leave alone."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from jobs.engine.config import TrainingConfig
from jobs.engine.console import Console
from jobs.engine.identity import configuration_hash
from jobs.engine.job import MembersJob
from jobs.engine.launch import claim_directory, delete_checkpoints, fit, record_start
from jobs.engine.recording import RecordModels, finish, record_end
from jobs.engine.task import Membership, Plan, PreparedTask
from jobs.engine.tracking import TrackedRun


def train_group(
    plans: Sequence[Plan],
    *,
    directory: str,
    parent_run_id: str,
    with_progress: bool,
    origin: Mapping[str, str],
    record_models: RecordModels | None,
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Train runs side by side to their end, or continue them. Ray must be running, and their names must be free.

    The checkpoints are those of all members together, in a directory of their own beside the members' directories.
    A member keeps configuration, report, export and outcome in its own directory, as if it had been trained alone.

    Args:
        plans: the plans of the members; they share data, base and workers (`jobs.tasks.side_by_side.can_share_base`).
        directory: path or URI of the directory that holds the members' directories.
        parent_run_id: ID of the MLflow run that the members' runs are shown under; empty for none.
        with_progress: whether to show progress in this terminal.
        origin: `origin_tags` of the process that started the job.
        record_models: registers exports as models in MLflow; None: no models are registered.

    Returns:
        Name → outcome of every member that has finished, and name → reason of every member that has failed.

    Raises:
        FatalTrainingError, TrainingFailedError: see `jobs.engine.launch.train`.
    """
    names = [plan.config.run.name for plan in plans]
    prepared = _prepare(plans)
    config = _group_config(plans, directory)
    tracked: dict[str, TrackedRun] = {}
    for name, plan, task in zip(names, plans, prepared, strict=True):
        claim_directory(plan.config)
        if run := record_start(plan, task, parent_run_id, origin):
            tracked[name] = run
    with Console(config.run.num_steps) if with_progress else nullcontext() as console:
        job = MembersJob(
            create_task=Membership.join(names, [task.membership for task in prepared if task.membership], config),
            tracked_run=None,
            tracked_members=tracked,
            mailbox=console.mailbox if console else None,
            with_bar=sys.stderr.isatty(),
        )
        result = fit(config, job, data_cpus=plans[0].data_cpus)
    unsent = result["unsent_metrics"]
    outcomes = {}
    for name, plan, task in zip(names, plans, prepared, strict=True):
        if name not in result["members"]:
            continue
        found = result["members"][name] | {"unsent_metrics": unsent.get(name, [])}
        outcomes[name] = finish(plan, task, tracked.get(name), found)
        record_end(plan.config, outcomes[name], record_models)
    delete_checkpoints(config.run.directory)
    return outcomes, result["failed"]


def _prepare(plans: Sequence[Plan]) -> list[PreparedTask]:
    """Prepare every plan; what this prints is shown for the first one only, because it is the same for all of them."""
    prepared = []
    for number, plan in enumerate(plans):
        with contextlib.redirect_stdout(io.StringIO()) if number else nullcontext():
            prepared.append(plan.prepare())
    return prepared


def _group_config(plans: Sequence[Plan], directory: str) -> TrainingConfig:
    """Return the first member's configuration with a name that stands for all members."""
    content = "".join(f"{plan.config.run.name} {configuration_hash(plan.config)}\n" for plan in plans)
    digest = hashlib.blake2b(content.encode(), digest_size=6).hexdigest()
    first = plans[0].config
    run = dataclasses.replace(first.run, name=f"side-by-side-{digest}", storage=directory)
    return dataclasses.replace(first, run=run)
