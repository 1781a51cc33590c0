"""Running many training runs as trials, as many at a time as fit into the cluster, each driven by a task of Ray.

A trial is an ordinary run with its own directory, checkpoints and outcome. From these it is recognised when the job is
started again: a finished trial is not repeated, and an interrupted one continues. A trial that fails, by an error or
because its process was killed, is reported as failed and does not end the others. Sweeps, which search and end trials
early, run their trials with Ray Tune (`jobs.studies.sweeps`).
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import ray

from jobs.engine.cluster import check_resources
from jobs.engine.config import TrainingConfig
from jobs.engine.console import clock
from jobs.engine.identity import flatten
from jobs.engine.launch import claim_directory, train
from jobs.engine.lease import Lease
from jobs.engine.masking import masked
from jobs.engine.recording import record_end
from jobs.engine.task import Plan
from jobs.engine.tracking import TrackedRun, end_children, mark_if_ended, origin_tags, survive_outage
from jobs.engine.worker import EarlyStopping
from jobs.scoring.mlflow_models.run import record_models
from pipelines.storage import read_json

DRIVER_CPUS = 0.01
"""Logical CPUs of the process that drives a trial; the trial's workers have their own."""
_SECONDS_OF_OUTAGE = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A training run to be made."""

    config: TrainingConfig
    make_plan: Callable[[Any], Plan]
    keep_checkpoints: bool = True
    """Whether to keep the checkpoints; False: they are deleted once the run has an outcome."""
    early_stopping: EarlyStopping | None = None
    """A rule that may end the run early; None: it runs to its end."""

    @property
    def name(self) -> str:
        """Name of the run, unique within its storage."""
        return self.config.run.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcomes:
    """The outcomes of the trials, in the order in which the trials were requested."""

    finished: Mapping[str, dict[str, Any]]
    """Name of a finished trial → its outcome."""
    failed: Mapping[str, str]
    """Name of a failed trial → its error."""


Rounds: TypeAlias = Generator[Sequence[Trial], Outcomes, None]
"""Generator that yields the trials of a round, which may run concurrently, and is sent the outcomes of all so far."""


def one_round(trials: Sequence[Trial]) -> Rounds:
    """Yields all trials in a single round."""
    yield trials


def run_trials(
    rounds: Rounds,
    *,
    length: int,
    directory: str,
    parent: TrackedRun | None,
    num_concurrent: int,
    data_cpus: float,
    describe: Callable[[Mapping[str, Any]], str],
) -> Outcomes:
    """Run or continue every trial that is not finished yet, and return the outcomes of all. Ray must be running.

    Args:
        rounds: yields the trials, at least one; a round may depend on the outcomes of the previous ones.
        length: number of trials of all rounds together; used to report progress.
        directory: path or URI of the job, of which only one driver may run the trials.
        parent: the MLflow parent run of the trials' runs. If it is ended, so are they.
        num_concurrent: maximum number of trials at a time; 0: as many as fit into the cluster.
        data_cpus: logical CPUs that each trial uses to read data.
        describe: describes an outcome in a few words.

    Raises:
        ValueError: if the cluster cannot run so many trials at a time, if a trial's directory holds another
            configuration, or if another driver is running these trials.
    """
    finished: dict[str, dict[str, Any]] = {}
    failed: dict[str, str] = {}
    num_before, started = 0, time.monotonic()
    with Lease(directory), mark_if_ended(parent):
        trials = next(rounds)
        while True:
            waiting = []
            for trial in trials:
                if (outcome := claim_directory(trial.config)) is None:
                    waiting.append(trial)
                else:
                    finished[trial.name] = outcome
                    num_before += 1
                    record_end(trial.config, outcome, record_models)
            print(f"trials finished before: {num_before}, in {directory}", flush=True)
            for trial, reason in _run_round(waiting, parent, num_concurrent, data_cpus):
                if outcome := read_json(f"{trial.config.run.directory}/outcome.json"):
                    finished[trial.name] = outcome
                else:
                    failed[trial.name] = reason
                num_done = len(finished) + len(failed)
                seconds_left = (time.monotonic() - started) / (num_done - num_before) * max(0, length - num_done)
                text = describe(outcome) if outcome else "FAILED"
                print(f"{num_done / length:4.0%}  {trial.name}  {text}  {clock(seconds_left)} left", flush=True)
            try:
                trials = rounds.send(Outcomes(finished=finished, failed=failed))
            except StopIteration:
                break
        if parent is not None and failed:
            with survive_outage("the end of the trials that failed"):
                end_children(parent, "FAILED")  # a trial whose process was killed could not record this itself
    return Outcomes(finished=finished, failed=failed)


def _run_round(
    trials: Sequence[Trial], parent: TrackedRun | None, num_concurrent: int, data_cpus: float
) -> Iterable[tuple[Trial, str]]:
    """Run trials, and yield each one that has ended with its error, if it has one."""
    if not trials:
        return
    num_at_once = find_room(trials[0].config, data_cpus, num_concurrent)
    run: Any = ray.remote(_run_trial)  # type: ignore[arg-type]  # Ray's annotations know no keywords
    waiting, running = list(trials), dict[Any, Trial]()
    while waiting or running:
        while waiting and len(running) < num_at_once:
            trial = waiting.pop(0)
            ref = run.options(num_cpus=DRIVER_CPUS, max_retries=0).remote(
                trial,
                parent_run_id=parent.run_id if parent else "",
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
        yield trial, describe_error(error)


def _run_trial(
    trial: Trial, *, parent_run_id: str, directory: str, shares_cores: bool, origin: Mapping[str, str]
) -> None:
    """Run one trial, in a process that is used for further trials.

    Args:
        trial: the trial.
        parent_run_id: ID of the MLflow parent run; empty if nothing is tracked.
        directory: the directory in which the job was started; relative paths refer to it.
        shares_cores: whether other trials run at the same time; one that is alone uses all cores.
        origin: the `origin_tags` of the job's driver.
    """
    if os.path.isdir(directory):
        os.chdir(directory)
    train(
        make_plan_in_outage(trial),
        parent_run_id=parent_run_id,
        with_progress=False,
        early_stopping=trial.early_stopping,
        keep_checkpoints=trial.keep_checkpoints,
        shares_cores=shares_cores,
        origin=origin,
        record_models=record_models,
    )


def find_room(config: TrainingConfig, data_cpus: float, num_concurrent: int = 0) -> int:
    """Returns how many such trials to run at a time: `num_concurrent`, or as many as fit into the cluster if that is 0.

    Raises:
        ValueError: if the cluster cannot run that many, or not even one, with the arithmetic.
    """
    workers = config.workers
    check_resources(
        num_workers=workers.max_workers,
        cpus_per_worker=workers.cpus_per_worker,
        use_gpu=workers.use_gpu,
        data_cpus=data_cpus + DRIVER_CPUS,
    )
    total = ray.cluster_resources()
    cpus_per_trial = workers.max_workers * workers.cpus_per_worker + data_cpus + DRIVER_CPUS
    # Rounded, since sums such as .7 + .3 may exceed the CPUs that they use up entirely by an error in the last digit.
    rooms = [math.floor(round(total.get("CPU", 0) / cpus_per_trial, 6))]
    if workers.use_gpu:
        rooms.append(int(total.get("GPU", 0) / workers.max_workers))
    room = min(rooms)
    if num_concurrent > room:
        raise ValueError(
            f"num_concurrent = {num_concurrent} trials at a time, but the cluster has room for {room}: choose at most "
            f"{room}, or 0 for as many as fit"
        )
    return num_concurrent or room


def make_plan_in_outage(trial: Trial, seconds_between: float = 10.0) -> Plan:
    """Returns the trial's plan; if MLflow does not answer, waits and tries again, as running trials do in an outage.

    Raises:
        ConnectionError: if MLflow does not answer for half an hour.
    """
    deadline = time.monotonic() + _SECONDS_OF_OUTAGE
    while True:
        try:
            return trial.make_plan(trial.config)
        except ConnectionError as error:
            if time.monotonic() > deadline:
                raise
            print(f"{trial.name} waits for MLflow: {masked(str(error))}", flush=True)
            time.sleep(seconds_between)


def describe_error(error: Exception | None) -> str:
    """Returns the last line of an error's text, which describes the original error."""
    text = getattr(error, "cause", None) or error or "the process that drives the trial ended"
    lines = str(text).strip().splitlines()
    return masked(lines[-1]) if lines else "unknown"


def prepare_once(plans: Iterable[Plan]) -> dict[str, tuple[str, str, str]]:
    """Prepare the data that trials share, once for each distinct data configuration. Ray must be running.

    Trials that prepared them at the same time would write the same files.

    Returns:
        context → (name, digest, source URI), for MLflow. The contexts of the second data configuration are `train-1`
            and so on.
    """
    distinct: dict[str, Plan] = {}
    for plan in plans:
        data = {name: value for name, value in flatten(plan.config).items() if name.startswith("data.")}
        distinct.setdefault(json.dumps(data, sort_keys=True), plan)
    data_sets: dict[str, tuple[str, str, str]] = {}
    for number, plan in enumerate(distinct.values()):
        for context, data_set in plan.prepare().data_sets.items():
            data_sets[f"{context}-{number}" if number else context] = data_set
    return data_sets
