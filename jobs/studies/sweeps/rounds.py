"""The search of a sweep as rounds of trials, each with the rules that may end it early."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import ray

from jobs.engine.config import TrainingConfig
from jobs.engine.watch import Validation
from jobs.studies.sweeps.config import SweepConfig
from jobs.studies.sweeps.objective import loss_of
from jobs.studies.sweeps.plan import Sweep
from jobs.studies.sweeps.round_record import RoundRecord
from jobs.studies.sweeps.schedulers import SchedulerRace
from jobs.studies.sweeps.search import Point, PointResult
from jobs.studies.sweeps.stopping import BandRule, Halving, TrialWatch
from jobs.studies.trials.trial import Outcomes, Rounds, Trial
from jobs.tasks.language_model.config import LanguageModelConfig
from jobs.tasks.language_model.plan import make_plan as make_language_model_plan
from pipelines.actor_start import on_this_node, wait_until_started
from pipelines.storage import read_json


def make_rounds(sweep: Sweep, record: RoundRecord) -> Rounds:
    """Yields the rounds of a sweep's search as trials, without those whose failure is final."""
    config = sweep.config
    is_band = config.sweep.search == "band"
    search = config.start(_calibrate_rho(config) if is_band else None)
    race = start_race(SchedulerRace, sweep.scheduler) if sweep.scheduler else None
    points = next(search)
    while True:
        configs = [config.trial(point) for point in points]
        names = [trial.run.name for trial in configs]
        record.begin(dict(zip(names, points, strict=True)))
        for trial in configs:
            if race is not None and (outcome := read_json(f"{trial.run.directory}/outcome.json")):
                _report(race, trial.run.name, outcome)  # it finished before the sweep was continued
        watches = [_make_watch(sweep, trial, race, len(points)) for trial in configs]
        finished = yield from run_round(sweep, record, configs, watches)
        results = [
            read_result(point, finished.get(name), trial.run.num_steps)
            for point, name, trial in zip(points, names, configs, strict=True)
        ]
        if is_band and race is None:
            inside = [name for name, result in zip(names, results, strict=True) if result.is_in(config.sweep.band)]
            if inside:  # now there is a trial to compare others with
                race = start_race(Halving, config.base.run.num_steps, config.sweep.band)
                for name in inside:
                    _report(race, name, finished[name])
        try:
            points = search.send(results)
        except StopIteration:
            return


def run_round(
    sweep: Sweep, record: RoundRecord, configs: Sequence[TrainingConfig], watches: Sequence[TrialWatch | None]
) -> Generator[Sequence[Trial], Outcomes, Mapping[str, Any]]:
    """Yields a round as trials, without those whose failure is final, and records what failed in it.

    Returns the outcomes of the trials that finished, by name.
    """
    trials = [
        Trial(config=trial, make_plan=sweep.make_plan, watch=watch)
        for trial, watch in zip(configs, watches, strict=True)
        if trial.run.name not in record.final_failures
    ]
    if not trials:
        return {}
    outcomes = yield trials
    record.save({**record.final_failures, **outcomes.failed})
    return outcomes.finished


def tau_mean(outcome: Mapping[str, Any]) -> float:
    """Returns the mean temperature of the last validation, or NaN if there is none."""
    return float(outcome["validation"].get("tau_mean", math.nan))


def start_race(actor_class: Any, *arguments: Any) -> Any:
    """Start the actor in which the trials of a sweep compete."""
    race = ray.remote(actor_class).options(num_cpus=0, scheduling_strategy=on_this_node()).remote(*arguments)
    wait_until_started(race)
    return race


def _report(race: Any, name: str, outcome: Mapping[str, Any]) -> None:
    """Report the validations of a trial that has ended."""
    validations: Sequence[Validation] = [Validation(**validation) for validation in outcome["validations"]]
    ray.get(race.goes_on.remote(name, validations))


def _make_watch(sweep: Sweep, trial: TrainingConfig, race: Any, num_points: int) -> TrialWatch | None:
    """Returns the rules that may end a trial early; None for a grid or random search without a scheduler."""
    is_band = sweep.config.sweep.search == "band"
    if not is_band and sweep.scheduler is None:
        return None
    temperature: Any = trial.temperature  # type: ignore[attr-defined]  # both kinds have it
    tau_min, tau_max = temperature.tau_range
    rule = BandRule(band=sweep.config.sweep.band, tau_min=tau_min, tau_max=tau_max, num_steps=trial.run.num_steps)
    # A point of a band search that is alone in its round was chosen from the results of the others, so it does not
    # compete with them.
    is_alone = is_band and num_points == 1
    return TrialWatch(
        trial=trial.run.name, rule=rule if temperature.has_free_tau else None, race=None if is_alone else race
    )


def _calibrate_rho(config: SweepConfig[Any]) -> float | None:
    """Returns the first ρ to try, or None if nothing is known beforehand.

    For a frozen language model whose first axis is ρ, it is the ρ whose mean optimal temperature is in the middle of
    the band.
    """
    base, band = config.base, config.sweep.band
    if not (
        isinstance(base, LanguageModelConfig)
        and base.model.is_frozen
        and next(iter(config.sweep.values)) == "temperature.rho"
    ):
        return None
    temperature = dataclasses.replace(
        base.temperature, rho=None, target_entropy=None, calibrated_tau=math.sqrt(band[0] * band[1])
    )
    prepared = make_language_model_plan(dataclasses.replace(base, temperature=temperature)).prepare()
    prepared.write_records(config.run.directory)  # so that a continued search begins with the same ρ
    return float(prepared.outcome["rho"])


def read_result(point: Point, outcome: Mapping[str, Any] | None, num_steps: int) -> PointResult:
    """Returns the result of the trial at a point; an outcome of None stands for a failed trial."""
    if outcome is None:
        return PointResult(point=point, tau_mean=math.nan, loss=math.nan, share=1.0)
    share = outcome["num_steps"] / num_steps if outcome["stopped"] else 1.0
    return PointResult(point=point, tau_mean=tau_mean(outcome), loss=loss_of(outcome["validation"]), share=share)
