"""Running many training runs as the trials of one Ray Tune experiment, as many at a time as fit into the cluster.

A trial is an ordinary run with its own directory, checkpoints and outcome. From these it is recognised when the job is
started again: a finished trial is not repeated, and an interrupted one continues. Tune's own state is never read back.
A trial that fails, by an error or because its process was killed, is reported as failed and does not end the others.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import ray
from ray import cloudpickle, tune
from ray.tune.experiment import Trial as TuneTrial
from ray.tune.search import Searcher

from jobs.engine.cluster import check_resources
from jobs.engine.config import TrainingConfig
from jobs.engine.console import clock
from jobs.engine.launch import claim_directory, train
from jobs.engine.lease import Lease
from jobs.engine.masking import masked
from jobs.engine.recording import record_end
from jobs.engine.task import Plan
from jobs.engine.tracking import TrackedRun, end_children, mark_if_ended, origin_tags, survive_outage
from jobs.engine.watch import Watch
from jobs.scoring.mlflow_models.run import record_models
from pipelines.storage import read_json, resolve

# Logical CPUs of the process that drives a trial; the trial's workers have their own.
_DRIVER_CPUS = 0.01
_SECONDS_OF_OUTAGE = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A training run to be made."""

    config: TrainingConfig
    make_plan: Callable[[Any], Plan]
    keep_checkpoints: bool = True
    """Whether to keep the checkpoints; False: they are deleted once the run has an outcome."""
    watch: Watch | None = None
    """A rule that may end the run early; None: it runs to its end."""

    @property
    def name(self) -> str:
        """Name of the run."""
        return self.config.run.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcomes:
    """The outcomes of the trials, in the order in which the trials were requested."""

    finished: Mapping[str, dict[str, Any]]
    """Name of a finished trial → its outcome."""
    failed: Mapping[str, str]
    """Name of a failed trial → its error."""


Rounds: TypeAlias = Generator[Sequence[Trial], Outcomes, None]
"""Generator that yields the trials of a round, which may run concurrently, and is sent their outcomes."""


def one_round(trials: Sequence[Trial]) -> Rounds:
    """Yields all trials in a single round."""
    yield trials


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
        search = _RoundSearch(rounds)
        print(f"{len(search.finished)} trials finished before; {directory}", flush=True)
        if search.is_over:
            return search.outcomes()
        num_at_once = room_for(search.first.config, data_cpus, num_concurrent)
        # Tune's own output files and printing are not needed: runs have their own directories, MLflow runs and lines.
        # Tune's handling of Ctrl-C is turned off, since it would end only the trials, which would then be reported as
        # failed. Here Ctrl-C ends the job.
        os.environ |= {
            "RAY_CHDIR_TO_TRIAL_DIR": "0",
            "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
            "RAY_AIR_NEW_OUTPUT": "0",
            "TUNE_DISABLE_SIGINT_HANDLER": "1",
        }
        logging.getLogger("ray.tune").setLevel(logging.CRITICAL)
        filesystem, path = resolve(directory)
        run_trial = tune.with_parameters(
            _run_trial,
            parent_run_id=parent.run_id if parent else "",
            directory=os.getcwd(),
            num_at_once=num_at_once,
            origin=origin_tags(),
            tracking_uri=search.first.config.tracking.uri,
        )
        tuner = tune.Tuner(
            tune.with_resources(run_trial, {"CPU": _DRIVER_CPUS}),
            tune_config=tune.TuneConfig(
                search_alg=search, num_samples=-1, max_concurrent_trials=num_at_once, reuse_actors=True
            ),
            run_config=tune.RunConfig(
                name="tune",
                storage_path=path,
                storage_filesystem=filesystem,
                verbose=0,
                callbacks=[_Progress(search, length, describe)],
            ),
        )
        results = tuner.fit()
        if search.error is not None:
            raise search.error
        outcomes = search.outcomes()
        reasons = {
            (result.config or {})["name"]: _reason(result.error) for result in (results[i] for i in range(len(results)))
        }
        if parent is not None and outcomes.failed:
            with survive_outage("the end of the trials that failed"):
                end_children(parent, "FAILED")  # a trial whose process was killed could not record this itself
        return Outcomes(
            finished=outcomes.finished, failed={name: reasons.get(name, why) for name, why in outcomes.failed.items()}
        )


class _RoundSearch(Searcher):
    """Hands trials to Tune one at a time, and none while the next round still waits for trials of the current one."""

    def __init__(self, rounds: Rounds) -> None:
        super().__init__()
        self._rounds = rounds
        self._asked: list[Trial] = []
        self._waiting: list[Trial] = []
        self._is_alone = False
        self._running: dict[str, Trial] = {}
        self._failed: dict[str, str] = {}
        self.finished: dict[str, dict[str, Any]] = {}
        # name → share of its steps that it ran, for every trial that has ended in this session
        self.shares: dict[str, float] = {}
        self.is_over = False
        self.error: Exception | None = None
        """An error raised by the rounds; it is kept here because Tune would swallow it."""
        self._start_round(next(rounds))

    @property
    def first(self) -> Trial:
        """The first trial; all trials need the same resources."""
        return self._asked[0]

    def outcomes(self) -> Outcomes:
        """Returns the outcomes so far."""
        names = [trial.name for trial in self._asked]
        return Outcomes(
            finished={name: self.finished[name] for name in names if name in self.finished},
            failed={name: self._failed[name] for name in names if name in self._failed},
        )

    def share_found(self) -> float:
        """Returns the length, in whole trials, of the trials that were finished before this session."""
        found = (trial for trial in self._asked if trial.name in self.finished and trial.name not in self.shares)
        return sum(_share(trial, self.finished[trial.name]) for trial in found)

    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:  # type: ignore[override]  # FINISHED is a string
        """Returns the next trial; None if it is not known yet, or FINISHED if there are no more."""
        if self.is_over:
            return Searcher.FINISHED
        if not self._waiting:
            return None
        trial = self._waiting.pop(0)
        self._running[trial_id] = trial
        return {"name": trial.name, "trial": cloudpickle.dumps(_logging_to(trial, "")), "is_alone": self._is_alone}

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Record how a trial ended, and start the next round; if it finished, its outcome is in its directory."""
        trial = self._running.pop(trial_id)
        if outcome := read_json(f"{trial.config.run.directory}/outcome.json"):
            self.finished[trial.name] = outcome
            self.shares[trial.name] = _share(trial, outcome)
        else:
            self._failed[trial.name] = "the process that drives the trial ended"
            self.shares[trial.name] = 1.0
        if not self._waiting and not self._running:
            try:
                self._next_round()
            except Exception as error:
                self.error, self.is_over = error, True

    def _start_round(self, trials: Sequence[Trial]) -> None:
        self._asked += trials
        for trial in trials:
            if (outcome := claim_directory(trial.config)) is not None:
                self.finished[trial.name] = outcome
                record_end(trial.config, outcome, record_models)
            else:
                self._waiting.append(trial)
        self._is_alone = len(self._waiting) == 1
        if not self._waiting:
            self._next_round()

    def _next_round(self) -> None:
        try:
            trials = self._rounds.send(self.outcomes())
        except StopIteration:
            self.is_over = True
        else:
            self._start_round(trials)

    def save(self, checkpoint_path: str) -> None:
        """Does nothing, because Tune's own state is never read back."""

    def restore(self, checkpoint_path: str) -> None:
        """Does nothing, because Tune's own state is never read back."""

    def __getstate__(self) -> dict[str, Any]:
        return {}


def room_for(config: TrainingConfig, data_cpus: float, num_concurrent: int = 0) -> int:
    """Returns how many such trials to run at a time: `num_concurrent`, or as many as fit into the cluster if that is 0.

    Raises:
        ValueError: if the cluster cannot run that many, or not even one, with the arithmetic.
    """
    workers = config.workers
    check_resources(
        num_workers=workers.num_workers,
        cpus_per_worker=workers.cpus_per_worker,
        use_gpu=workers.use_gpu,
        data_cpus=data_cpus + _DRIVER_CPUS,
    )
    total = ray.cluster_resources()
    rooms = [total.get("CPU", 0) / (workers.num_workers * workers.cpus_per_worker + data_cpus + _DRIVER_CPUS)]
    if workers.use_gpu:
        rooms.append(total.get("GPU", 0) / workers.num_workers)
    room = max(1, math.floor(min(rooms)))
    if num_concurrent > room:
        raise ValueError(
            f"{num_concurrent} trials at a time, but the cluster has room for {room}: choose at most {room}"
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
    trial = _logging_to(cloudpickle.loads(settings["trial"]), tracking_uri)
    train(
        _planned(trial),
        parent_run_id=parent_run_id,
        with_progress=False,
        watch=trial.watch,
        keep_checkpoints=trial.keep_checkpoints,
        shares_cores=num_at_once > 1 and not settings["is_alone"],
        origin=origin,
        record_models=record_models,
    )
    tune.report({"finished": 1})


def _logging_to(trial: Trial, uri: str) -> Trial:
    tracking = dataclasses.replace(trial.config.tracking, uri=uri)
    return dataclasses.replace(trial, config=dataclasses.replace(trial.config, tracking=tracking))


def _planned(trial: Trial, seconds_between: float = 10.0) -> Plan:
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
            print(f"{trial.name} waits: {masked(str(error))}", flush=True)
            time.sleep(seconds_between)


class _Progress(tune.Callback):
    """Prints a line for every trial that ends."""

    def __init__(self, search: _RoundSearch, length: float, describe: Callable[[Mapping[str, Any]], str]) -> None:
        self._search, self._length, self._describe = search, length, describe
        self._started = time.monotonic()

    def on_trial_complete(self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, **info: Any) -> None:
        name = trial.config["name"]
        outcome = self._search.finished.get(name)
        self._say(name, self._describe(outcome) if outcome else "ended without an outcome")

    def on_trial_error(self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, **info: Any) -> None:
        self._say(trial.config["name"], "FAILED")

    def _say(self, name: str, what: str) -> None:
        made = sum(self._search.shares.values())
        done = made + self._search.share_found()
        rest = (time.monotonic() - self._started) / made * max(0.0, self._length - done)
        print(f"{done / self._length:4.0%}  {name}  {what}  {clock(rest)} left", flush=True)


def _share(trial: Trial, outcome: Mapping[str, Any]) -> float:
    """Returns the share of its steps that a trial ran for."""
    return float(outcome["num_steps"] / trial.config.run.num_steps)


def _reason(error: Exception | None) -> str:
    """Returns the last line of an error's text, which describes the original error."""
    lines = (
        str(getattr(error, "cause", None) or error or "the process that drives the trial ended").strip().splitlines()
    )
    return masked(lines[-1]) if lines else "unknown"
