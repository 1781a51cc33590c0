"""Runs a plan to its end: starts Ray, prepares the data, opens the MLflow run, trains and writes the report.

Whatever can be refused without Ray is refused before it starts: by the configuration, by the plan, or by
`jobs.engine.preflight`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from pyarrow.fs import FileSelector
from ray.train import UserCallback
from ray.train.v2.api.exceptions import TrainingFailedError

from jobs.engine.cluster import check_resources, start_ray
from jobs.engine.cluster_loss import naming_lost_cluster
from jobs.engine.command_line import show
from jobs.engine.config import TrainingConfig
from jobs.engine.console import Console
from jobs.engine.failures import describe_continuation, describe_failure, explain_end
from jobs.engine.identity import flatten, recorded_values
from jobs.engine.job import FatalTrainingError, WorkerJob
from jobs.engine.late_export import write_task
from jobs.engine.lease import Lease
from jobs.engine.masking import masked
from jobs.engine.preflight import Named, check_plan, find_outcome
from jobs.engine.progress import note_failure
from jobs.engine.recording import RecordModels, finish, record_end
from jobs.engine.resumption import registered_step
from jobs.engine.run_list import describe_run
from jobs.engine.stopping import stopping_softly
from jobs.engine.tags import run_tags
from jobs.engine.task import Plan, PreparedTask
from jobs.engine.tracking import TrackedRun, mark_if_ended, open_run, resolve_uri, survive_outage
from jobs.engine.trainer import make_trainer, run_trainer
from jobs.engine.watch import Watch
from pipelines.storage import create_directory, resolve, write_json


def tracking_uri(config: TrainingConfig) -> str:
    """Return the MLflow URI that a run is logged to; empty if it is not logged.

    Raises:
        ValueError, ConnectionError: see :func:`resolve_uri`.
    """
    return resolve_uri(config.tracking, config.run.resolved_storage)


def train(
    plan: Plan,
    *,
    parent_run_id: str = "",
    with_progress: bool = True,
    watch: Watch | None = None,
    keep_checkpoints: bool = True,
    shares_cores: bool = False,
    saves_validated: bool = False,
    callbacks: Sequence[UserCallback] = (),
    origin: Mapping[str, str] | None = None,
    record_models: RecordModels | None = None,
) -> dict[str, Any]:
    """Run a plan to its end, continuing an earlier run of the same name, and return its outcome.

    The outcome is also written to `outcome.json` in the run's directory.

    Args:
        plan: the plan of the run.
        parent_run_id: ID of the MLflow run that this run is shown under; empty for none.
        with_progress: whether to show progress in this terminal; trials of a sweep do not.
        watch: may end the run before its last step; the outcome then gives the reason (`stopped`).
        keep_checkpoints: whether to keep the checkpoints after the outcome is written.
        shares_cores: whether other runs train at the same time on the same machine.
        saves_validated: whether to write a checkpoint after every validation.
        callbacks: callbacks of Ray Train.
        origin: `origin_tags` of the process that started the job; None: of this process.
        record_models: registers checkpoints and export as models in MLflow; None: no models are registered.

    Raises:
        ValueError: before training starts, if the run name is taken, another driver trains this run, the cluster is too
            small, or checkpoints exist but none is whole. Other exceptions that refuse a run are possible.
        FatalTrainingError: if a loss is not finite (the message names the step and the contents of its batch), a disk
            is full, or there was no room for all workers within `run.max_wait_minutes`.
        TrainingFailedError: if a worker group failed more often than `run.max_restarts`.
        KeyboardInterrupt: on Ctrl-C; the training since the last checkpoint is lost.
    """
    config = plan.config
    outcome = check_plan(plan)
    show(plan.describe())
    if outcome is not None:
        record_end(config, outcome, record_models)
        print("\nThis run is finished; its results:", flush=True)
        return outcome
    with Lease(config.run.directory), naming_lost_cluster(config.run.directory):
        prepared = _prepare(plan)
        outcome = claim_directory(config)  # only now, so that a run that cannot start does not take the name
        if outcome is not None:
            return outcome  # another driver held the lease until now and finished the run
        if so_far := describe_run(config.run.directory):
            show(so_far)
        tracked = record_start(plan, prepared, parent_run_id, origin or {})
        with mark_if_ended(tracked), _recorded_if_failed(plan, tracked, record_models):
            result = _fit_plan(
                plan,
                prepared,
                tracked,
                with_progress=with_progress,
                watch=watch,
                shares_cores=shares_cores,
                saves_validated=saves_validated,
                callbacks=callbacks,
            )
        outcome = finish(plan, prepared, tracked, result)
        if not keep_checkpoints:
            delete_checkpoints(config.run.directory)
        record_end(config, outcome, record_models)
        return outcome


def _prepare(plan: Plan) -> PreparedTask:
    """Prepare the data of a plan, as soon as it is certain that Ray has room for its run."""
    workers = plan.config.workers
    start_ray()
    check_resources(
        num_workers=workers.min_workers,
        cpus_per_worker=workers.cpus_per_worker,
        use_gpu=workers.use_gpu,
        data_cpus=plan.data_cpus * workers.min_workers / workers.max_workers,
    )
    return plan.prepare()


def record_start(
    plan: Plan, prepared: PreparedTask, parent_run_id: str, origin: Mapping[str, str]
) -> TrackedRun | None:
    """Write what was prepared into the run's directory; return the run's MLflow run, or None if it is not logged."""
    prepared.write_records(plan.config.run.directory)
    write_task(plan.config)
    return _open_tracked_run(plan, prepared, parent_run_id, origin) if plan.tracking_uri else None


def _fit_plan(
    plan: Plan,
    prepared: PreparedTask,
    tracked: TrackedRun | None,
    *,
    with_progress: bool,
    watch: Watch | None,
    shares_cores: bool,
    saves_validated: bool,
    callbacks: Sequence[UserCallback],
) -> dict[str, Any]:
    """Train a plan that is prepared, as :func:`fit` does, and show its progress in this terminal if that is wanted."""
    run = plan.config.run
    with Console(run.num_steps, max_stall_minutes=run.max_stall_minutes) if with_progress else nullcontext() as console:
        job = WorkerJob(
            create_task=prepared.create_task,
            tracked_run=tracked,
            mailbox=console.mailbox if console else None,
            with_bar=sys.stderr.isatty(),
            watch=watch,
            shares_cores=shares_cores,
            saves_validated=saves_validated,
        )
        try:
            return fit(plan.config, job, data_cpus=plan.data_cpus, callbacks=callbacks)
        except KeyboardInterrupt:
            if console is None or not console.stalled:
                raise
            raise FatalTrainingError(f"{console.stalled}; {describe_continuation(run.directory)}") from None


def fit(
    config: TrainingConfig, job: WorkerJob, *, data_cpus: float, callbacks: Sequence[UserCallback] = ()
) -> dict[str, Any]:
    """Train from the newest checkpoint that is whole, and return the result of rank 0; see `make_trainer`.

    Raises:
        FatalTrainingError: if restarting the workers would fail in the same way, also if no checkpoint is whole.
        KeyboardInterrupt: on Ctrl-C, and on SIGTERM, after the workers have saved the current step.
    """
    mailbox: Any = job.mailbox
    ask = None if mailbox is None else mailbox.ask_to_stop.remote
    trainer = make_trainer(config, job, data_cpus=data_cpus, callbacks=callbacks)
    try:
        with stopping_softly(ask, grace_seconds=config.run.grace_seconds, say=print) if ask else nullcontext():
            result = run_trainer(trainer)
    except TrainingFailedError as error:
        if message := explain_end(error, config.run.directory, max_wait_minutes=config.run.max_wait_minutes):
            raise FatalTrainingError(message) from error
        raise
    if "fatal" in result:
        raise FatalTrainingError(result["fatal"])
    if "interrupted" in result:
        print(f"saved at step {result['interrupted']}", flush=True)
        raise KeyboardInterrupt
    return result


@contextmanager
def _recorded_if_failed(plan: Plan, tracked: TrackedRun | None, record_models: RecordModels | None) -> Iterator[None]:
    """Note the cause and register the checkpoints as models in MLflow if the run fails inside the block."""
    try:
        yield
    except (FatalTrainingError, TrainingFailedError) as error:
        directory = plan.config.run.directory
        cause = describe_failure(error) if isinstance(error, TrainingFailedError) else str(error)
        note_failure(directory, masked(cause), step=registered_step(directory), is_final=True)
        if tracked and record_models is not None:
            with survive_outage("the checkpoints"):
                record_models(plan.config, tracked, None)
        raise


def claim_directory(config: Named) -> dict[str, Any] | None:
    """Create the run's directory for this configuration, or reuse it, and return the outcome if the run is finished.

    Raises:
        ValueError: see :func:`find_outcome`.
    """
    outcome = find_outcome(config)
    create_directory(config.run.directory)
    write_json(f"{config.run.directory}/configuration.json", recorded_values(config))
    return outcome


def _open_tracked_run(plan: Plan, prepared: PreparedTask, parent_run_id: str, origin: Mapping[str, str]) -> TrackedRun:
    """Open the MLflow run of a plan, or find it again if the run is continued."""
    config = plan.config
    tags = {**origin, **run_tags(config, config.tracking)}
    return open_run(
        uri=plan.tracking_uri,
        experiment=config.tracking.experiment,
        name=config.run.name,
        directory=config.run.directory,
        parameters={**flatten(config), **prepared.parameters},
        tags=tags | ({"mlflow.parentRunId": parent_run_id} if parent_run_id else {}),
        data_sets=prepared.data_sets,
    )


def delete_checkpoints(directory: str) -> None:
    """Delete all checkpoints in the directory of a run."""
    filesystem, path = resolve(directory)
    for entry in filesystem.get_file_info(FileSelector(path)):
        if entry.base_name.startswith("checkpoint-"):
            filesystem.delete_dir(entry.path)
