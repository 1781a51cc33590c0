"""Many training runs as the trials of one Ray Tune experiment: side by side as far as the cluster has room.

A trial is a run like any other, with a directory, checkpoints and an outcome of its own, in which it is found again: a
finished one is not run again, a stopped one continues. Nothing of Tune's own state is read back. One that fails, by an error
or because its process was killed, is reported as failed and does not end the others.
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
from jobs.engine.launch import claim_directory, train
from jobs.engine.lease import Lease
from jobs.engine.masking import masked
from jobs.engine.recording import record_end
from jobs.engine.task import Plan
from jobs.engine.tracking import TrackedRun, end_children, mark_if_ended, origin_tags, survive_outage
from jobs.engine.watch import Watch
from jobs.scoring.mlflow_models.run import record_models
from pipelines.storage import read_json, resolve

# Of the process that drives a trial; its workers have their own.
_DRIVER_CPUS = 0.01
_SECONDS_OF_OUTAGE = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A run that is to be made."""

    config: TrainingConfig
    make_plan: Callable[[Any], Plan]
    keep_checkpoints: bool = True
    """False: they are deleted once the outcome is there."""
    watch: Watch | None = None
    """May end it early."""

    @property
    def name(self) -> str:
        """Of the run."""
        return self.config.run.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcomes:
    """What became of the trials, in the order in which they were asked for."""

    finished: Mapping[str, dict[str, Any]]
    """Name → outcome."""
    failed: Mapping[str, str]
    """Name → the error."""


Rounds: TypeAlias = Generator[Sequence[Trial], Outcomes, None]
"""Yields the trials of a round, side by side as far as there is room, and is sent what became of them."""


def one_round(trials: Sequence[Trial]) -> Rounds:
    """All of them, whatever comes of the others."""
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
    """Run, continue or find every trial; needs Ray.

    Args:
        rounds: the trials, at least one; the next round may depend on what came of the ones before.
        length: of all rounds together, in whole trials, at most; for the progress.
        directory: for what Tune writes.
        parent: the MLflow run that those of the trials are shown under; where this is ended, so are they.
        num_concurrent: trials at a time; 0: as many as there is room for.
        data_cpus: logical CPUs that a trial reads with.
        describe: an outcome in a few words.

    Raises:
        ValueError: if the cluster has no room for so many, another configuration holds a trial's directory, or another
            driver runs these trials.
    """
    with Lease(directory), mark_if_ended(parent):
        search = _RoundSearch(rounds)
        print(f"{len(search.finished)} trials finished before; {directory}", flush=True)
        if search.is_over:
            return search.outcomes()
        num_at_once = room_for(search.first.config, data_cpus, num_concurrent)
        # What Tune would write and print beside it is of no use here: runs have their own directories, MLflow and lines.
        # Ctrl-C ends the job: Tune would end the trials instead, which would then be reported as failed.
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
                end_children(parent, "FAILED")  # one whose process was killed could not say so
        return Outcomes(
            finished=outcomes.finished, failed={name: reasons.get(name, why) for name, why in outcomes.failed.items()}
        )


class _RoundSearch(Searcher):
    """Rounds as Tune asks for them: one trial at a time, none while a round is still running that others wait for."""

    def __init__(self, rounds: Rounds) -> None:
        super().__init__()
        self._rounds = rounds
        self._asked: list[Trial] = []
        self._waiting: list[Trial] = []
        self._is_alone = False
        self._running: dict[str, Trial] = {}
        self._failed: dict[str, str] = {}
        self.finished: dict[str, dict[str, Any]] = {}
        self.shares: dict[str, float] = {}  # of its steps, for every trial that has ended here
        self.is_over = False
        self.error: Exception | None = None
        """Of the rounds, which Tune would swallow."""
        self._start_round(next(rounds))

    @property
    def first(self) -> Trial:
        """All are of a size."""
        return self._asked[0]

    def outcomes(self) -> Outcomes:
        """So far."""
        names = [trial.name for trial in self._asked]
        return Outcomes(
            finished={name: self.finished[name] for name in names if name in self.finished},
            failed={name: self._failed[name] for name in names if name in self._failed},
        )

    def share_found(self) -> float:
        """Of the trials that were finished before, in whole ones."""
        found = (trial for trial in self._asked if trial.name in self.finished and trial.name not in self.shares)
        return sum(_share(trial, self.finished[trial.name]) for trial in found)

    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:  # type: ignore[override]  # FINISHED is a string
        """The next trial; None: later; FINISHED: no more."""
        if self.is_over:
            return Searcher.FINISHED
        if not self._waiting:
            return None
        trial = self._waiting.pop(0)
        self._running[trial_id] = trial
        return {"name": trial.name, "trial": cloudpickle.dumps(_logging_to(trial, "")), "is_alone": self._is_alone}

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """A finished one has left its outcome in its directory."""
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
        """Nothing of Tune's own state is read back."""

    def restore(self, checkpoint_path: str) -> None:
        """Likewise."""

    def __getstate__(self) -> dict[str, Any]:
        return {}


def room_for(config: TrainingConfig, data_cpus: float, num_concurrent: int = 0) -> int:
    """How many such trials run at a time: `num_concurrent`, or as many as the cluster has room for.

    Raises:
        ValueError: if it cannot run so many, or not one, with the arithmetic.
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
    """Runs in the process that drives a trial, which goes on to the next one.

    Args:
        directory: where the job was started, from which relative paths are meant.
        num_at_once: trials at a time, where a round has as many; the only one of its round has all cores.
        origin: `origin_tags` of the driver of the job.
        tracking_uri: of all trials; it may hold a password, which Tune would write to disk with what a trial is.
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
    """Its plan; while MLflow does not answer, nothing, as trials that have begun do not stop for an outage either.

    Raises:
        ConnectionError: if it does not answer for half an hour.
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
    """A line for every trial that ends."""

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
    """Of its steps that a trial ran for."""
    return float(outcome["num_steps"] / trial.config.run.num_steps)


def clock(seconds: float) -> str:
    """Hours, minutes and seconds."""
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"


def _reason(error: Exception | None) -> str:
    """The last line of an error's text, which is the error that was raised first."""
    lines = (
        str(getattr(error, "cause", None) or error or "the process that drives the trial ended").strip().splitlines()
    )
    return masked(lines[-1]) if lines else "unknown"
