"""Running many training runs as the trials of one study, and what all studies end with: a table, files, an MLflow run.

A trial is an ordinary run, which is recognised when the job is started again: a finished trial is not repeated, and an
interrupted one continues. One that fails is reported and does not end the others. As many trials run at a time as fit into
the cluster, each driven by a task of Ray, which trains a trial of one worker with one CPU itself; those that share a frozen
base may instead train side by side. Sweeps that end trials early run them with Ray Tune (`jobs.studies.sweeps`).
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import pyarrow.fs
import ray

from jobs.engine.cluster import check_resources
from jobs.engine.command_line import FAILED, ending_in_one_line, show
from jobs.engine.config import TrackingSection, TrainingConfig
from jobs.engine.console import clock, note_failure
from jobs.engine.fields import flatten
from jobs.engine.launch import Named, claim_directory, make_plan, record_end, train, train_group
from jobs.engine.lease import Lease
from jobs.engine.masking import masked
from jobs.engine.metrics import TrackedRun, survive_outage
from jobs.engine.resumption import CrashedTrainingError, registered_step
from jobs.engine.task import Plan
from jobs.engine.tracking import (
    end_children,
    finish_run,
    mark_if_ended,
    open_run,
    origin_tags,
    run_tags,
    where_to_browse,
)
from jobs.engine.worker import worker_environment
from jobs.scoring.mlflow_models import record_models
from jobs.scoring.results import write_results
from pipelines.storage import exists, read_json, resolve

DRIVER_CPUS = 0.01
"""Logical CPUs of the process that drives a trial; the trial's workers have their own."""
_SECONDS_OF_OUTAGE = 1800.0
_PROCESS_DIED = (ray.exceptions.WorkerCrashedError, ray.exceptions.OutOfMemoryError, ray.exceptions.NodeDiedError)

Row = TypeVar("Row")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    config: TrainingConfig
    after: str = ""
    """Name of the trial from whose export this one starts; empty if there is none."""
    keep_checkpoints: bool = True
    """Whether to keep the checkpoints; False: they are deleted once the run has an outcome."""

    @property
    def name(self) -> str:
        """Name of the run, unique within its storage."""
        return self.config.run.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcomes:
    finished: Mapping[str, dict[str, Any]]
    """Name of a finished trial → its outcome."""
    failed: Mapping[str, str]
    """Name of a failed trial → its error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Results(Generic[Row]):
    rows: Sequence[Row]
    table: str
    failed: Mapping[str, str]
    """Name of a failed trial → its error."""
    directory: str
    tracking_uri: str
    """URI of the MLflow store; empty if nothing was tracked."""
    experiment_id: str
    """MLflow's ID of the experiment; empty if nothing was tracked."""


def run_command(
    config: Named,
    make: Callable[[Any], Any],
    run: Callable[[Any], Results[Any]],
    check: Callable[[Any], None],
    *,
    dry_run: bool,
    files: str,
) -> int:
    """Make the plan, and either print it or run it and print the results; returns the exit status, 1 if a trial failed.

    `check` refuses what `run` refuses before it starts Ray; `files` are those of the results to point the user to.
    """
    with ending_in_one_line(lambda: config.run.directory):
        work = make(config)
        if dry_run:
            show(work.describe())
            check(work)
            return 0
        results = run(work)
    print(f"\n{results.table}\n\n  results   {results.directory} ({files})")
    for name, reason in results.failed.items():
        show(f"  FAILED    {name}: {reason}")
    if results.tracking_uri:
        print("\nTo look around, type:")
        print(where_to_browse(results.tracking_uri, results.experiment_id))
    return FAILED if results.failed else 0


def open_parent(
    config: Named,
    tracking: TrackingSection,
    *,
    uri: str,
    num_trials: int,
    data_sets: Mapping[str, tuple[str, str, str]],
) -> TrackedRun | None:
    """Open the MLflow parent run of the trials, or find it again if they are continued; None if `uri` is empty."""
    if not uri:
        return None
    return open_run(
        uri=uri,
        experiment=tracking.experiment,
        name=config.run.name,
        directory=config.run.directory,
        parameters={**flatten(config), "num_trials": num_trials},
        tags=run_tags(config, tracking),
        data_sets=data_sets,
    )


def run_trials(
    trials: Sequence[Trial],
    *,
    directory: str,
    parent: TrackedRun | None,
    describe: Callable[[Mapping[str, Any]], str],
    num_concurrent: int = 0,
    data_cpus: float = 0.0,
    num_side_by_side: int = 1,
) -> Outcomes:
    """Run or continue every trial that is not finished yet, and return the outcomes of all. Ray must be running.

    Args:
        trials: the trials; one that starts from another runs after it, and fails if that one fails.
        directory: path or URI of the job, of which only one driver may run the trials.
        parent: the MLflow parent run of the trials' runs. If it is ended, so are they.
        describe: describes an outcome in a few words.
        num_concurrent: maximum number of trials at a time; 0: as many as fit into the cluster.
        data_cpus: logical CPUs that each trial uses to read data.
        num_side_by_side: maximum number of trials that train side by side, after the others (:func:`shares_base`).
    """
    finished: dict[str, dict[str, Any]] = {}
    failed: dict[str, str] = {}
    with Lease(directory), mark_if_ended(parent):
        waiting = []
        for trial in trials:
            if (outcome := claim_directory(trial.config)) is None:
                waiting.append(trial)
            else:
                finished[trial.name] = outcome
                record_end(trial.config, outcome, record_models)
        num_before, started = len(finished), time.monotonic()
        print(f"trials finished before: {num_before}, in {directory}", flush=True)
        parent_run_id = parent.run_id if parent else ""
        groups = find_groups(waiting, num_side_by_side)
        grouped = {trial.name for group in groups for trial in group}
        alone = [trial for trial in waiting if trial.name not in grouped]
        for trial, reason in itertools.chain(
            _run_tasks(alone, parent_run_id, num_concurrent, data_cpus),
            _run_side_by_side(groups, finished, parent_run_id, directory),
        ):
            if outcome := read_json(f"{trial.config.run.directory}/outcome.json"):
                finished[trial.name] = outcome
            else:
                failed[trial.name] = reason
            num_done = len(finished) + len(failed)
            seconds_left = (time.monotonic() - started) / (num_done - num_before) * (len(trials) - num_done)
            text = describe(outcome) if outcome else "FAILED"
            print(f"{num_done / len(trials):4.0%}  {trial.name}  {text}  {clock(seconds_left)} left", flush=True)
        record_failures(parent, failed)
    return Outcomes(finished=finished, failed=failed)


def record_failures(parent: TrackedRun | None, failed: Mapping[str, str]) -> None:
    """Mark the MLflow runs of failed trials, which one whose process was killed could not do itself."""
    if parent is not None and failed:
        with survive_outage("the end of the trials that failed"):
            end_children(parent, "FAILED")


def shares_base(configs: Sequence[TrainingConfig]) -> bool:
    """Return whether these runs can train side by side: networks alone, on the same frozen base and the same batches, that
    differ in numbers of the sections temperature and optimizer.
    """
    return len(configs) > 1 and len(set(map(_describe_shared, configs))) == 1


def _describe_shared(config: TrainingConfig) -> str:
    """Returns what runs that train side by side have in common; a run that can only train alone has its own name."""

    def is_own(field: str, value: Any) -> bool:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        orders_data = field in ("optimizer.batch_size", "optimizer.micro_batch_size")
        return is_number and field.startswith(("temperature.", "optimizer.")) and not orders_data

    if not config.trains_networks_alone or config.run.start_from:
        return config.run.name
    values = {field: value for field, value in flatten(config).items() if not is_own(field, value)}
    return json.dumps({**values, "run.name": "", "run.storage": ""}, sort_keys=True, default=str)


def find_groups(trials: Sequence[Trial], num_at_once: int) -> list[list[Trial]]:
    """Returns the trials that train side by side, in groups of at most `num_at_once`; others may start from none of them."""
    bases = {trial.after for trial in trials}
    by_base: dict[str, list[Trial]] = {}
    for trial in trials:
        if trial.name not in bases and trial.keep_checkpoints:
            by_base.setdefault(_describe_shared(trial.config), []).append(trial)
    groups = [group[at : at + num_at_once] for group in by_base.values() for at in range(0, len(group), num_at_once)]
    return [group for group in groups if len(group) > 1]


def _run_side_by_side(
    groups: Sequence[Sequence[Trial]], finished: Mapping[str, Any], parent_run_id: str, directory: str
) -> Iterator[tuple[Trial, str]]:
    """Run one group of trials after the other, and yield each trial with its error; `finished` has the names so far."""
    for group in groups:
        if (base := group[0].after) and base not in finished:
            yield from ((trial, _base_failed(base)) for trial in group)
            continue
        print(f"{len(group)} networks train side by side on one base", flush=True)
        try:
            reasons = train_group(
                [make_plan_in_outage(trial.config) for trial in group],
                directory=directory,
                parent_run_id=parent_run_id,
                origin=origin_tags(),
                record_models=record_models,
            )
        except Exception as error:
            reasons = dict.fromkeys([trial.name for trial in group], describe_error(error))
        for trial in group:
            if reason := reasons.get(trial.name, ""):
                note_failure(trial.config.run.directory, reason, step=0, is_final=True)
            yield trial, reason


def _run_tasks(
    trials: Sequence[Trial], parent_run_id: str, num_concurrent: int, data_cpus: float
) -> Iterator[tuple[Trial, str]]:
    """Run each trial in a task of Ray, and yield it with its error, if it has one, when it has ended."""
    if not trials:
        return
    num_at_once = find_room(trials[0].config, data_cpus, num_concurrent)
    run: Any = ray.remote(_run_trial)  # type: ignore[arg-type]  # Ray's annotations know no keywords
    waiting, running, starts = list(trials), dict[Any, Trial](), Counter[str]()
    unfinished = {trial.name for trial in trials}
    while waiting or running:
        ready = [trial for trial in waiting if trial.after not in unfinished]
        for trial in ready[: num_at_once - len(running)]:
            waiting.remove(trial)
            starts[trial.name] += 1
            ref = run.options(**_task_options(trial.config)).remote(
                trial,
                parent_run_id=parent_run_id,
                directory=os.getcwd(),
                shares_cores=min(num_at_once, len(trials)) > 1,
                origin=origin_tags(),
            )
            running[ref] = trial
        (ref,), _ = ray.wait(list(running))
        trial, error = running.pop(ref), None
        try:
            ray.get(ref)
        except Exception as raised:
            error = raised
        # Ray's own retries of a task have no limit where memory is short.
        cause = getattr(error, "cause", None)
        has_crashed = isinstance(error, _PROCESS_DIED) or isinstance(cause, CrashedTrainingError)
        # Workers of Ray Train are restarted by it instead.
        num_restarts = trial.config.run.max_restarts if _trains_in_task(trial.config) else 0
        if error and has_crashed and starts[trial.name] <= num_restarts:
            reason, run_directory = describe_error(error), trial.config.run.directory
            note_failure(run_directory, reason, step=registered_step(run_directory), is_final=False)
            print(f"{trial.name} is restarted: {reason}", flush=True)
            waiting.insert(0, trial)
            continue
        if exists(f"{trial.config.run.directory}/outcome.json"):
            unfinished.remove(trial.name)
        yield trial, describe_error(error)
        if trial.name in unfinished:
            for later in [later for later in waiting if later.after == trial.name]:
                waiting.remove(later)
                yield later, _base_failed(trial.name)


def _base_failed(base: str) -> str:
    return f"{base}, the run that it starts from, failed"


def _trains_in_task(config: TrainingConfig) -> bool:
    # A process that is used again saves the start of a controller and a worker for every trial. The memory of a GPU would
    # stay taken in it, and data that are prepared meanwhile need CPUs of their own.
    workers, is_streaming = config.workers, flatten(config).get("data.prepare") == "streaming"
    return workers.max_workers == 1 and workers.cpus_per_worker <= 1.0 and not workers.use_gpu and not is_streaming


def _task_options(config: TrainingConfig) -> dict[str, Any]:
    """Returns the options of the Ray task that runs a trial."""
    if not _trains_in_task(config):
        return {"num_cpus": DRIVER_CPUS, "max_retries": 0}
    num_cpus, environment = DRIVER_CPUS + config.workers.cpus_per_worker, {"env_vars": worker_environment(config)}
    return {"num_cpus": num_cpus, "max_retries": 0, "runtime_env": environment}


def _run_trial(
    trial: Trial, *, parent_run_id: str, directory: str, shares_cores: bool, origin: Mapping[str, str]
) -> None:
    """Run one trial, in a process that is used for further trials; see :func:`run_trials`."""
    if os.path.isdir(directory):
        os.chdir(directory)
    train(
        make_plan_in_outage(trial.config),
        parent_run_id=parent_run_id,
        in_this_process=_trains_in_task(trial.config),
        with_progress=False,
        keep_checkpoints=trial.keep_checkpoints,
        shares_cores=shares_cores,
        origin=origin,
        record_models=record_models,
    )


def find_room(config: TrainingConfig, data_cpus: float, num_concurrent: int) -> int:
    """Returns `num_concurrent`, or if that is 0, as many trials as the cluster has room for; ValueError if it has not."""
    workers = config.workers
    check_resources(
        num_workers=workers.max_workers,
        cpus_per_worker=workers.cpus_per_worker,
        use_gpu=workers.use_gpu,
        data_cpus=data_cpus + DRIVER_CPUS,
        num_runs=num_concurrent or 1,
        max_wait_minutes=config.run.max_wait_minutes,
    )
    total = ray.cluster_resources()
    cpus_per_trial = workers.max_workers * workers.cpus_per_worker + data_cpus + DRIVER_CPUS
    # Rounded, since sums such as .7 + .3 may exceed the CPUs that they use up entirely by an error in the last digit.
    room = math.floor(round(total.get("CPU", 0) / cpus_per_trial, 6))
    if workers.use_gpu:
        room = min(room, int(total.get("GPU", 0) / workers.max_workers))
    if num_concurrent > room:
        raise ValueError(
            f"num_concurrent = {num_concurrent} trials at a time, but the cluster has room for {room}: choose at most "
            f"{room}, or 0 for as many as fit"
        )
    return num_concurrent or room


def make_plan_in_outage(config: TrainingConfig, seconds_between: float = 10.0) -> Plan:
    """Returns the plan of a run; if MLflow does not answer, waits and tries again for half an hour, as runs do."""
    deadline = time.monotonic() + _SECONDS_OF_OUTAGE
    while True:
        try:
            return make_plan(config)
        except ConnectionError as error:
            if time.monotonic() > deadline:
                raise
            print(f"{config.run.name} waits for MLflow: {masked(str(error))}", flush=True)
            time.sleep(seconds_between)


def describe_error(error: Exception | None) -> str:
    """Returns the last line of an error's text, which describes the original error; of a lack of memory the first."""
    text = getattr(error, "cause", None) or error or "the process that drives the trial ended"
    lines = str(text).strip().splitlines() or ["unknown"]
    return masked(lines[0 if isinstance(text, ray.exceptions.OutOfMemoryError) else -1])


def describe_data(config: TrainingConfig) -> str:
    """Returns what runs whose data are prepared together have in common."""
    values = flatten(config)
    data = {name: value for name, value in values.items() if name.startswith("data.")}
    if data.get("data.train_share", 1.0) < 1.0:
        data["run.seed"] = values["run.seed"]  # which draws the documents
    return json.dumps(data, sort_keys=True)


def prepare_once(plans: Iterable[Plan]) -> dict[str, tuple[str, str, str]]:
    """Prepare the data that trials share, once for each distinct data configuration, as they would write the same files.

    Ray must be running. Returned is context → (name, digest, source URI), for MLflow; the contexts of the second data
    configuration are `train-1` and so on.
    """
    distinct: dict[str, Plan] = {}
    for plan in plans:
        distinct.setdefault(describe_data(plan.config), plan)
    return {
        f"{context}-{number}" if number else context: data_set
        for number, plan in enumerate(distinct.values())
        for context, data_set in plan.prepare().data_sets.items()
    }


def publish(
    config: Any,
    parent: TrackedRun | None,
    *,
    rows: Sequence[Row],
    table: str,
    content: Mapping[str, Any],
    files: Mapping[str, str | bytes] | None = None,
    metrics: Mapping[str, float],
    tags: Mapping[str, str] | None = None,
    failed: Mapping[str, str],
) -> Results[Row]:
    """Publish results in the run's directory and in MLflow, and return what to show to the user.

    Writes `results.md` (the table), `results.json` (the configuration, the content and the failed trials) and `files` (name →
    content). They and the metrics are also logged to the parent run, which is then finished.
    """
    results = masked({"configuration": dataclasses.asdict(config), **content, "failed": dict(failed)})
    with tempfile.TemporaryDirectory() as local:
        write_results(Path(local, "results.json"), results)
        for name, data in {"results.md": table + "\n", **(files or {})}.items():
            Path(local, name).write_bytes(data.encode() if isinstance(data, str) else data)
        filesystem, path = resolve(config.run.directory)
        pyarrow.fs.copy_files(local, path, destination_filesystem=filesystem)
        if parent is not None:
            with survive_outage("the results"):
                status = "FAILED" if failed else "FINISHED"
                finish_run(parent, status=status, artifacts=Path(local), metrics=metrics, tags=tags, note=table)
    return Results(
        rows=rows,
        table=table,
        failed=failed,
        directory=config.run.directory,
        tracking_uri=parent.uri if parent else "",
        experiment_id=parent.experiment_id if parent else "",
    )
