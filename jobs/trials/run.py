"""Many training runs as the trials of one Ray Tune experiment: side by side as far as the cluster has room.

A trial is a run like any other, with a directory, checkpoints and an outcome of its own, in which it is found again: a
finished one is not run again, a stopped one continues. Nothing of Tune's own state is read back. One that fails, by an error
or because its process was killed, is reported as failed and does not end the others.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray import cloudpickle, tune
from ray.tune.experiment import Trial as TuneTrial

from jobs.cluster import check_resources
from jobs.training.config import TrainingConfig
from jobs.training.launch import claim_directory, train
from jobs.training.task import Plan
from pipelines.archives import resolve
from pipelines.manifest import read_json

# Of the process that drives a trial; its workers have their own.
_DRIVER_CPUS = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A run that is to be made."""

    config: TrainingConfig
    make_plan: Callable[[Any], Plan]
    keep_checkpoints: bool = True
    """False: they are deleted once the outcome is there."""

    @property
    def name(self) -> str:
        """Of the run."""
        return self.config.run.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcomes:
    """What became of the trials."""

    finished: Mapping[str, dict[str, Any]]
    """Name → outcome."""
    failed: Mapping[str, str]
    """Name → the error."""


def run_trials(
    trials: Sequence[Trial],
    *,
    directory: str,
    parent_run_id: str,
    num_concurrent: int,
    data_cpus: float,
    describe: Callable[[Mapping[str, Any]], str],
) -> Outcomes:
    """Run, continue or find every trial; needs Ray.

    Args:
        directory: for what Tune writes.
        parent_run_id: the MLflow run that those of the trials are shown under; empty for none.
        num_concurrent: trials at a time; 0: as many as there is room for.
        data_cpus: logical CPUs that a trial reads with.
        describe: an outcome in a few words.

    Raises:
        ValueError: if the cluster has no room for so many, or another configuration holds a trial's directory.
    """
    finished = {trial.name: outcome for trial in trials if (outcome := claim_directory(trial.config)) is not None}
    left = {trial.name: trial for trial in trials if trial.name not in finished}
    print(f"{len(trials)} trials, {len(finished)} of them finished before; {directory}", flush=True)
    if not left:
        return Outcomes(finished=finished, failed={})
    room = room_for(trials[0].config, data_cpus)
    if num_concurrent > room:
        raise ValueError(
            f"{num_concurrent} trials at a time, but the cluster has room for {room}: choose at most {room}"
        )
    # What Tune would write and print beside it is of no use here: runs have their own directories, MLflow and lines.
    # Ctrl-C ends the job: Tune would end the trials instead, which would then be reported as failed.
    os.environ |= {
        "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
        "RAY_AIR_NEW_OUTPUT": "0",
        "TUNE_DISABLE_SIGINT_HANDLER": "1",
    }
    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)
    filesystem, path = resolve(directory)
    tuner = tune.Tuner(
        tune.with_resources(
            tune.with_parameters(_run_trial, trials=cloudpickle.dumps(left), parent_run_id=parent_run_id),
            {"CPU": _DRIVER_CPUS},
        ),
        param_space={"name": tune.grid_search(list(left))},
        tune_config=tune.TuneConfig(max_concurrent_trials=num_concurrent or room, reuse_actors=True),
        run_config=tune.RunConfig(
            name="tune",
            storage_path=path,
            storage_filesystem=filesystem,
            verbose=0,
            callbacks=[_Progress(left, describe)],
        ),
    )
    failed = {}
    results = tuner.fit()
    for result in (results[number] for number in range(len(results))):
        name = (result.config or {})["name"]
        if ended := read_json(f"{left[name].config.run.directory}/outcome.json"):
            finished[name] = ended
        else:
            failed[name] = _reason(result.error)
    in_order = {trial.name: finished[trial.name] for trial in trials if trial.name in finished}
    return Outcomes(finished=in_order, failed=failed)


def room_for(config: TrainingConfig, data_cpus: float) -> int:
    """How many such trials the cluster can run at a time.

    Raises:
        ValueError: if it cannot run one, with the arithmetic.
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
    return max(1, math.floor(min(rooms)))


def _run_trial(settings: Mapping[str, str], *, trials: bytes, parent_run_id: str) -> None:
    """Runs in the process that drives a trial, which goes on to the next one."""
    trial: Trial = cloudpickle.loads(trials)[settings["name"]]
    train(
        trial.make_plan(trial.config),
        parent_run_id=parent_run_id,
        with_progress=False,
        keep_checkpoints=trial.keep_checkpoints,
    )
    tune.report({"finished": 1})


class _Progress(tune.Callback):
    """A line for every trial that ends."""

    def __init__(self, trials: Mapping[str, Trial], describe: Callable[[Mapping[str, Any]], str]) -> None:
        self._trials, self._describe = trials, describe
        self._num_ended, self._started = 0, time.monotonic()

    def on_trial_complete(self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, **info: Any) -> None:
        name = trial.config["name"]
        outcome = read_json(f"{self._trials[name].config.run.directory}/outcome.json")
        self._say(name, self._describe(outcome) if outcome else "ended without an outcome")

    def on_trial_error(self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, **info: Any) -> None:
        self._say(trial.config["name"], "FAILED")

    def _say(self, name: str, what: str) -> None:
        self._num_ended += 1
        total = len(self._trials)
        rest = (time.monotonic() - self._started) / self._num_ended * (total - self._num_ended)
        print(f"{self._num_ended:>{len(str(total))}}/{total}  {name}  {what}  {clock(rest)} left", flush=True)


def clock(seconds: float) -> str:
    """Hours, minutes and seconds."""
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"


def _reason(error: Exception | None) -> str:
    """The last line of an error's text, which is the error that was raised first."""
    lines = (
        str(getattr(error, "cause", None) or error or "the process that drives the trial ended").strip().splitlines()
    )
    return lines[-1] if lines else "unknown"
