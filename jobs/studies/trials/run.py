"""Running many training runs as the trials of one Ray Tune experiment, as many at a time as fit into the cluster.

A trial is an ordinary run with its own directory, checkpoints and outcome. From these it is recognised when the job is
started again: a finished trial is not repeated, and an interrupted one continues. Tune's own state is never read back.
A trial that fails, by an error or because its process was killed, is reported as failed and does not end the others.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray import cloudpickle, tune

from jobs.engine.cluster import check_resources
from jobs.engine.config import TrainingConfig
from jobs.engine.launch import train
from jobs.engine.lease import Lease
from jobs.engine.masking import masked
from jobs.engine.tags import origin_tags
from jobs.engine.task import Plan
from jobs.engine.tracking import TrackedRun, end_children, mark_if_ended, survive_outage
from jobs.scoring.mlflow_models.run import record_models
from jobs.studies.trials.progress import ProgressLines
from jobs.studies.trials.searcher import NO_OUTCOME, RoundSearcher
from jobs.studies.trials.trial import Outcomes, Rounds, Trial
from jobs.studies.trials.trial_start import calling_trials_that_live
from pipelines.storage import resolve

# Logical CPUs of the process that drives a trial; the trial's workers have their own.
DRIVER_CPUS = 0.01
_SECONDS_OF_OUTAGE = 1800.0

# Tune's own output files and printing are not needed: runs have their own directories, MLflow runs and lines. Tune's
# handling of Ctrl-C is turned off, since it would end only the trials, which would then be reported as failed. Here
# Ctrl-C ends the job.
_TUNE_ENVIRONMENT = {
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "RAY_AIR_NEW_OUTPUT": "0",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
}


def run_trials(
    rounds: Rounds,
    *,
    length: float,
    directory: str,
    parent: TrackedRun | None,
    num_concurrent: int,
    data_cpus: float,
    describe: Callable[[Mapping[str, Any]], str],
) -> Outcomes:
    """Run or continue every trial that is not finished yet, and return the outcomes of all. Ray must be running.

    Args:
        rounds: yields the trials, at least one; a round may depend on the outcomes of the previous ones.
        length: maximum length of all rounds together, in whole trials; used to report progress.
        directory: where Tune writes its files.
        parent: the MLflow parent run of the trials' runs. If it is ended, so are they.
        num_concurrent: maximum number of trials at a time; 0: as many as fit into the cluster.
        data_cpus: logical CPUs that each trial uses to read data.
        describe: describes an outcome in a few words.

    Raises:
        ValueError: if the cluster cannot run so many trials at a time, if a trial's directory holds another
            configuration, or if another driver is running these trials.
    """
    with Lease(directory), mark_if_ended(parent):
        searcher = RoundSearcher(rounds)
        print(f"trials finished before: {len(searcher.finished)}, in {directory}", flush=True)
        if searcher.is_over:
            return searcher.outcomes()
        num_at_once = find_room(searcher.first.config, data_cpus, num_concurrent)
        progress = ProgressLines(searcher, length, describe)
        errors = _run_tune(searcher, progress, directory=directory, parent=parent, num_at_once=num_at_once)
        if searcher.error is not None:
            raise searcher.error
        outcomes = searcher.outcomes()
        if parent is not None and outcomes.failed:
            with survive_outage("the end of the trials that failed"):
                end_children(parent, "FAILED")  # a trial whose process was killed could not record this itself
        failed = {name: errors.get(name, error) for name, error in outcomes.failed.items()}
        return Outcomes(finished=outcomes.finished, failed=failed)


def _run_tune(
    searcher: RoundSearcher, progress: ProgressLines, *, directory: str, parent: TrackedRun | None, num_at_once: int
) -> dict[str, str]:
    """Run the trials and return name → a line that describes how it ended, which is an error if it has no outcome."""
    os.environ |= _TUNE_ENVIRONMENT
    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)
    filesystem, path = resolve(directory)
    run_trial = tune.with_parameters(
        _run_trial,
        parent_run_id=parent.run_id if parent else "",
        directory=os.getcwd(),
        num_at_once=num_at_once,
        origin=origin_tags(),
        tracking_uri=searcher.first.config.tracking.uri,
    )
    tuner = tune.Tuner(
        tune.with_resources(run_trial, {"CPU": DRIVER_CPUS}),
        tune_config=tune.TuneConfig(
            search_alg=searcher, num_samples=-1, max_concurrent_trials=num_at_once, reuse_actors=True
        ),
        run_config=tune.RunConfig(
            name="tune", storage_path=path, storage_filesystem=filesystem, verbose=0, callbacks=[progress]
        ),
    )
    with calling_trials_that_live():
        results = tuner.fit()
    return {
        (result.config or {})["name"]: describe_error(result.error)
        for result in (results[number] for number in range(len(results)))
    }


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


def _run_trial(
    settings: Mapping[str, Any],
    *,
    parent_run_id: str,
    directory: str,
    num_at_once: int,
    origin: Mapping[str, str],
    tracking_uri: str,
) -> None:
    """Run one trial, in a process that is reused for further trials.

    Args:
        settings: the pickled trial, its name, and whether it is alone in its round.
        parent_run_id: id of the MLflow parent run; empty if nothing is tracked.
        directory: the directory in which the job was started; relative paths refer to it.
        num_at_once: maximum number of trials that run at a time. The only trial of a round uses all cores.
        origin: the `origin_tags` of the job's driver.
        tracking_uri: MLflow URI of all trials. It may contain a password, so it is not part of the trial, which Tune
            would write to disk.
    """
    if os.path.isdir(directory):
        os.chdir(directory)
    trial: Trial = cloudpickle.loads(settings["trial"]).with_tracking_uri(tracking_uri)
    train(
        make_plan_in_outage(trial),
        parent_run_id=parent_run_id,
        with_progress=False,
        watch=trial.watch,
        keep_checkpoints=trial.keep_checkpoints,
        shares_cores=num_at_once > 1 and not settings["is_alone"],
        origin=origin,
        record_models=record_models,
    )
    tune.report({"finished": 1})


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
    lines = str(getattr(error, "cause", None) or error or NO_OUTCOME).strip().splitlines()
    return masked(lines[-1]) if lines else "unknown"
