"""Runs a plan to its end: prepares the data, opens the MLflow run, trains and writes the report.

A run trains with Ray, which is started here, or with `workers.local` in this process; then nothing of Ray is imported.
Whatever can be refused before that is refused by the configuration, by the plan, or by `jobs.engine.preflight`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from jobs.engine.command_line import FAILED, as_typed, exit_interrupted, fail, show
from jobs.engine.config import TrainingConfig
from jobs.engine.console import Console, Mailbox, note_failure
from jobs.engine.export import write_task
from jobs.engine.failures import FatalTrainingError, describe_continuation, explain_storage
from jobs.engine.identity import configuration_hash, flatten, recorded_values
from jobs.engine.lease import Lease, LostRunError
from jobs.engine.masking import masked
from jobs.engine.metrics import TrackedRun, survive_outage
from jobs.engine.preflight import Named, check_plan, find_outcome
from jobs.engine.recording import RecordModels, finish, record_end
from jobs.engine.resumption import found_checkpoints, registered_step
from jobs.engine.run_list import describe_run
from jobs.engine.stopping import stopping_softly
from jobs.engine.task import Plan, PreparedTask, create_members
from jobs.engine.tracking import mark_if_ended, open_run, resolve_uri, run_tags, where_to_browse
from jobs.engine.worker import EarlyStopping, WorkerJob, train_here
from pipelines.problems import TooManyProblemsError
from pipelines.storage import create_directory, resolve, write_json

if TYPE_CHECKING:
    from ray.train import UserCallback

Config = TypeVar("Config", bound=TrainingConfig)


def tracking_uri(config: TrainingConfig) -> str:
    """Return the MLflow URI that a run is logged to; empty if it is not logged (see :func:`resolve_uri`)."""
    return resolve_uri(config.tracking, config.run.resolved_storage)


def run_command(
    config: Config, make_plan: Callable[[Config], Plan], *, dry_run: bool, record_models: RecordModels
) -> Mapping[str, Any] | None:
    """Make the plan, then print it (dry run) or run it and print the results; return the outcome, None for a dry run.

    Exits the process with a message if the configuration or data are refused, if the run fails, and on Ctrl-C.
    """
    try:
        plan = make_plan(config)
        if dry_run:
            show(plan.describe())
            check_plan(plan)
            return None
        outcome = train(plan, record_models=record_models)
    except (ValueError, OSError, TooManyProblemsError) as error:
        fail(str(error))
    except (FatalTrainingError, LostRunError) as error:
        fail(str(error), FAILED)
    except KeyboardInterrupt:
        exit_interrupted(config.run.directory)
    show(f"\n{plan.summary_table(outcome)}\n")
    return outcome


def print_where_to_look(outcome: Mapping[str, Any], *, results: str, commands: Sequence[Sequence[str]]) -> None:
    """Print the last lines of a job: its directories, how to open MLflow, and which commands can follow."""
    print(f"  results   {outcome['directory']}/report ({results})")
    print(f"  model     {outcome['export']}\n")
    print("To look around, type:")
    if outcome["tracking_uri"]:
        print(where_to_browse(outcome["tracking_uri"], outcome.get("mlflow_experiment_id")))
    for command in commands:
        print(f"  {as_typed(command)}")


def train(
    plan: Plan,
    *,
    parent_run_id: str = "",
    with_progress: bool = True,
    early_stopping: EarlyStopping | None = None,
    keep_checkpoints: bool = True,
    shares_cores: bool = False,
    saves_validated: bool = False,
    callbacks: Sequence[UserCallback] = (),
    origin: Mapping[str, str] | None = None,
    record_models: RecordModels | None = None,
) -> dict[str, Any]:
    """Run a plan to its end, continuing an earlier run of the same name, and return its outcome (`outcome.json`).

    Args:
        plan: the plan of the run.
        parent_run_id: ID of the MLflow run that this run is shown under; empty for none.
        with_progress: whether to show progress in this terminal; trials of a sweep do not.
        early_stopping: may end the run before its last step; the outcome then gives the reason (`stopped`).
        keep_checkpoints: whether to keep the checkpoints after the outcome is written.
        shares_cores: whether other runs train at the same time on the same machine.
        saves_validated: whether to write a checkpoint after every validation.
        callbacks: callbacks of Ray Train.
        origin: `origin_tags` of the process that started the job; None: of this process.
        record_models: registers checkpoints and export as models in MLflow; None: no models are registered.

    Raises:
        ValueError: before training starts, if the run name is taken, another driver trains this run, the cluster is too
            small, or checkpoints exist but none is whole. Other exceptions that refuse a run are possible.
        FatalTrainingError: if the run has failed.
        KeyboardInterrupt: on Ctrl-C; the training since the last checkpoint is lost.
    """
    config = plan.config
    outcome = check_plan(plan)
    show(plan.describe())
    if outcome is not None:
        record_end(config, outcome, record_models)
        print("\nThis run is finished; its results:", flush=True)
        return outcome
    with Lease(config.run.directory), _naming_lost_cluster(config):
        prepared = _prepare(plan)
        outcome = claim_directory(config)  # only now, so that a run that cannot start does not take the name
        if outcome is not None:
            return outcome  # another driver held the lease until now and finished the run
        if so_far := describe_run(config.run.directory):
            show(so_far)
        tracked = record_start(plan, prepared, parent_run_id, origin or {})
        job = WorkerJob(
            create_task=prepared.create_task,
            tracked_runs={config.run.name: tracked} if tracked else {},
            early_stopping=early_stopping,
            shares_cores=shares_cores,
            saves_validated=saves_validated,
        )
        with mark_if_ended(tracked), _recorded_if_failed(plan, tracked, record_models):
            result = fit(config, job, data_cpus=plan.data_cpus, with_progress=with_progress, callbacks=callbacks)
        outcome = finish(plan, prepared, tracked, result)
        if not keep_checkpoints:
            delete_checkpoints(config.run.directory)
        record_end(config, outcome, record_models)
        return outcome


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

    Returns:
        Name → outcome of every member that has finished, and name → reason of every member that has failed.
    """
    names = [plan.config.run.name for plan in plans]
    prepared = []
    for number, plan in enumerate(plans):  # what this prints is the same for all of them
        with contextlib.redirect_stdout(io.StringIO()) if number else nullcontext():
            prepared.append(plan.prepare())
    # The 2 is the version of the group's checkpoints; those of the first are not read.
    content = "2" + "".join(f"{plan.config.run.name} {configuration_hash(plan.config)}\n" for plan in plans)
    name = f"side-by-side-{hashlib.blake2b(content.encode(), digest_size=6).hexdigest()}"
    configs = [task.config for task in prepared if task.config]
    config = dataclasses.replace(configs[0], run=dataclasses.replace(configs[0].run, name=name, storage=directory))
    tracked: dict[str, TrackedRun] = {}
    for name, plan, task in zip(names, plans, prepared, strict=True):
        claim_directory(plan.config)
        if run := record_start(plan, task, parent_run_id, origin):
            tracked[name] = run
    create = partial(create_members, prepared[0].create_task, configs, config)
    job = WorkerJob(create_task=create, tracked_runs=tracked)
    result = fit(config, job, data_cpus=plans[0].data_cpus, with_progress=with_progress)
    outcomes = {}
    for name, plan, task in zip(names, plans, prepared, strict=True):
        if name not in result["members"]:
            continue
        found = result["members"][name] | {"unsent_metrics": result["unsent_metrics"]}
        outcomes[name] = finish(plan, task, tracked.get(name), found)
        record_end(plan.config, outcomes[name], record_models)
    delete_checkpoints(config.run.directory)
    return outcomes, result["failed"]


def _naming_lost_cluster(config: TrainingConfig) -> AbstractContextManager[None]:
    if config.workers.local:
        return nullcontext()
    from jobs.engine.ray_failures import naming_lost_cluster

    return naming_lost_cluster(config.run.directory)


def _prepare(plan: Plan) -> PreparedTask:
    """Prepare the data of a plan, as soon as it is certain that Ray has room for its run."""
    workers = plan.config.workers
    if not workers.local:
        from jobs.engine import cluster

        cluster.start_ray()
        cluster.check_resources(
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
    config = plan.config
    prepared.write_records(config.run.directory)
    write_task(config)
    if not plan.tracking_uri:
        return None
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


def fit(
    config: TrainingConfig,
    job: WorkerJob,
    *,
    data_cpus: float,
    with_progress: bool,
    callbacks: Sequence[UserCallback] = (),
) -> dict[str, Any]:
    """Train from the newest checkpoint that is whole, and return the result of rank 0 (`train_from_newest`).

    SIGTERM has the workers save the current step, and ends as Ctrl-C does.
    """
    run, mailbox, ask = config.run, None, None
    if with_progress:
        mailbox = _make_mailbox(config)
        ask = mailbox.ask_to_stop
        job = dataclasses.replace(job, mailbox=mailbox, with_bar=sys.stderr.isatty())
    console = Console(mailbox, run.num_steps, max_stall_minutes=run.max_stall_minutes) if mailbox else None
    with console or nullcontext():
        try:
            with stopping_softly(ask, grace_seconds=run.grace_seconds, say=print) if ask else nullcontext():
                if config.workers.local:
                    result = _train_in_this_process(config, job)
                else:
                    from jobs.engine.ray_train import train_with_ray

                    result = train_with_ray(config, job, data_cpus=data_cpus, callbacks=callbacks)
        except KeyboardInterrupt:
            if console is None or not console.stalled:
                raise
            raise FatalTrainingError(f"{console.stalled}; {describe_continuation(run.directory)}") from None
    if "fatal" in result:
        raise FatalTrainingError(result["fatal"])
    if "interrupted" in result:
        print(f"saved at step {result['interrupted']}", flush=True)
        raise KeyboardInterrupt
    return result


def _train_in_this_process(config: TrainingConfig, job: WorkerJob) -> dict[str, Any]:
    directory = config.run.directory
    try:
        return train_here(job, config)
    except Exception as error:
        if message := explain_storage([error], directory):
            raise FatalTrainingError(message) from error
        cause = f"{type(error).__name__}: {error}"
        trace = traceback.format_exc()
        raise FatalTrainingError(f"{trace}{cause}; {describe_continuation(directory)}", cause) from error


def _make_mailbox(config: TrainingConfig) -> Any:
    if config.workers.local:
        return Mailbox()
    from jobs.engine.ray_worker import RemoteMailbox

    return RemoteMailbox()


@contextmanager
def _recorded_if_failed(plan: Plan, tracked: TrackedRun | None, record_models: RecordModels | None) -> Iterator[None]:
    """Note the cause and register the checkpoints as models in MLflow if the run fails inside the block."""
    try:
        yield
    except FatalTrainingError as error:
        directory = plan.config.run.directory
        note_failure(directory, masked(error.cause), step=registered_step(directory), is_final=True)
        if tracked and record_models is not None:
            with survive_outage("the checkpoints"):
                record_models(plan.config, tracked, None)
        raise


def claim_directory(config: Named) -> dict[str, Any] | None:
    """Create the run's directory for this configuration, or reuse it; return the outcome if the run is finished."""
    outcome = find_outcome(config)
    create_directory(config.run.directory)
    write_json(f"{config.run.directory}/configuration.json", recorded_values(config))
    return outcome


def delete_checkpoints(directory: str) -> None:
    """Delete all checkpoints in the directory of a run."""
    filesystem, path = resolve(directory)
    for name in found_checkpoints(directory):
        filesystem.delete_dir(f"{path}/{name}")
