"""Running a sweep as trials: checks, Ray, data preparation, MLflow, and the report at the end."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from jobs.engine.cluster import start_ray
from jobs.engine.config import TrainingConfig
from jobs.engine.identity import configuration_hash
from jobs.engine.launch import claim_directory, find_directory, tracking_uri
from jobs.engine.task import Plan
from jobs.engine.watch import Validation
from jobs.studies.sweeps.config import SweepConfig
from jobs.studies.sweeps.course import Course
from jobs.studies.sweeps.objective import TITLE, loss_of
from jobs.studies.sweeps.report import Row, markdown, page, row
from jobs.studies.sweeps.search import Point, Seen, corners
from jobs.studies.sweeps.stopping import BandRule, Halving, TrialWatch, rank
from jobs.studies.trials.command import Results
from jobs.studies.trials.parent import open_parent, publish
from jobs.studies.trials.prepare import prepare_once
from jobs.studies.trials.run import Rounds, Trial, room_for, run_trials
from jobs.tasks.dual_encoder.config import ClipConfig
from jobs.tasks.dual_encoder.plan import make_plan as make_clip_plan
from jobs.tasks.language_model.config import LanguageModelConfig
from jobs.tasks.language_model.plan import make_plan as make_language_model_plan
from pipelines.storage import read_json


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """The plan of a sweep, known before anything starts."""

    config: SweepConfig[Any]
    make_plan: Callable[[Any], Plan]
    plans: Sequence[Plan]
    """Plans of the first round's trials, followed by those of the trials at the ends of the axes."""

    @property
    def first(self) -> Plan:
        """Plan of the first trial."""
        return self.plans[0]

    def describe(self) -> str:
        """Returns the plan as text for the terminal."""
        config, run = self.config, self.config.run
        axes = ", ".join(f"{name} {min(axis):g} to {max(axis):g}" for name, axis in config.sweep.values.items())
        limit = "at most " if config.sweep.search == "band" else ""
        return (
            f"sweep        {run.name} in {run.directory} (configuration {configuration_hash(config)})\n"
            f"trials       {limit}{config.sweep.max_num_trials} ({config.sweep.search}): {axes}\n"
            f"looked for   a mean τ from {config.sweep.band[0]:g} to {config.sweep.band[1]:g}, then the best "
            f"{TITLE}\n\nThe first trial:\n{self.first.describe()}"
        )


def make_sweep(config: SweepConfig[Any]) -> Sweep:
    """Check everything that can be checked without Ray.

    Raises:
        ValueError, FileNotFoundError, OSError: naming the field, its value and the legal values.
    """
    # The trials log to the MLflow store of the sweep; by default they would create a database in their own storage.
    uri = tracking_uri(config.base)
    tracking = dataclasses.replace(config.base.tracking, uri=uri, enabled=bool(uri))
    config = dataclasses.replace(config, base=dataclasses.replace(config.base, tracking=tracking))
    is_clip = isinstance(config.base, ClipConfig)
    make_plan: Callable[[Any], Plan] = make_clip_plan if is_clip else make_language_model_plan
    plans = [make_plan(config.trial(point)) for point in [*next(config.start()), *corners(config.sweep.values)]]
    return Sweep(config=config, make_plan=make_plan, plans=plans)


def run_sweep(sweep: Sweep) -> Results[Row]:
    """Run or continue a sweep, and write `results.md`, `results.json` and `report.html` into its directory.

    Raises:
        ValueError: if another configuration has taken the name, or the cluster is too small.
    """
    config, band = sweep.config, sweep.config.sweep.band
    find_directory(config)
    print(sweep.describe(), flush=True)
    start_ray()
    # raises ValueError before data are prepared
    room_for(config.base, sweep.first.data_cpus, config.sweep.num_concurrent)
    data_sets = prepare_once(sweep.plans)
    claim_directory(config)
    parent = open_parent(
        config,
        run=config.run,
        tracking=config.base.tracking,
        uri=sweep.first.tracking_uri,
        num_trials=config.sweep.max_num_trials,
        data_sets=data_sets,
    )
    course = Course(config.run.directory)
    outcomes = run_trials(
        _rounds(sweep, course),
        length=config.sweep.length,
        directory=config.run.directory,
        parent=parent,
        num_concurrent=config.sweep.num_concurrent,
        data_cpus=sweep.first.data_cpus,
        describe=lambda outcome: (
            f"mean τ {tau_mean(outcome):.4f}, {TITLE} {loss_of(outcome['validation']):.4f}"
            + (f"; stopped: {outcome['stopped']}" if outcome["stopped"] else "")
        ),
    )
    failed = {**course.settled, **outcomes.failed}
    course.save(failed)
    found = [
        row(name, point, outcomes.finished.get(name), failed.get(name, ""), band)
        for name, point in course.points.items()
    ]
    num_combinations = math.prod(map(len, config.sweep.values.values()))
    table = markdown(found, band, num_combinations * config.base.run.num_steps)
    return publish(
        config.run,
        parent,
        rows=found,
        table=table,
        content={
            "configuration": dataclasses.asdict(config),
            "rows": [dataclasses.asdict(row) for row in found],
        },
        files={"report.html": page(config.run.name, found, band)},
        metrics={
            "num_in_band": sum(row.is_in_band for row in found),
            "num_failed": len(failed),
            "num_steps": sum(row.num_steps for row in found),
        },
        failed=failed,
    )


def tau_mean(outcome: Mapping[str, Any]) -> float:
    """Returns the mean temperature of the last validation, or NaN if there is none."""
    return float(outcome["validation"].get("tau_mean", math.nan))


def _rounds(sweep: Sweep, course: Course) -> Rounds:
    """Runs the search of a sweep as rounds of trials."""
    config, band = sweep.config, sweep.config.sweep.band
    is_watched = config.sweep.search == "band"
    search = config.start(_calibrated_rho(config) if is_watched else None)
    batch = next(search)
    halving: Any = None  # an actor, created once there is a trial to compare others with
    while True:
        configs = [config.trial(point) for point in batch]
        points = {trial.run.name: point for trial, point in zip(configs, batch, strict=True)}
        course.begin(points)
        trials = []
        for trial in configs:
            name = trial.run.name
            watch = None
            if is_watched:
                # A point that is alone in its round was chosen from the results of the others, so it does not compete
                # with them.
                race = halving if len(batch) > 1 else None
                watch = TrialWatch(trial=name, rule=_band_rule(trial, band), halving=race)
            if name not in course.settled:
                trials.append(Trial(config=trial, make_plan=sweep.make_plan, watch=watch))
            if halving is not None and (outcome := read_json(f"{trial.run.directory}/outcome.json")):
                _tell(halving, name, outcome, band)  # for a trial that finished before the sweep was continued
        finished: Mapping[str, Any] = {}
        if trials:
            outcomes = yield trials
            finished = outcomes.finished
            course.save({**course.settled, **outcomes.failed})
        seen = [_seen(points[trial.run.name], finished.get(trial.run.name), trial.run.num_steps) for trial in configs]
        if is_watched and halving is None:
            inside = [name for name, one in zip(points, seen, strict=True) if one.is_in(band)]
            if inside:  # now there is a trial to compare others with
                halving = ray.remote(Halving).options(num_cpus=0).remote(config.base.run.num_steps)
                for name in inside:
                    _tell(halving, name, finished[name], band)
        try:
            batch = search.send(seen)
        except StopIteration:
            return


def _calibrated_rho(config: SweepConfig[Any]) -> float | None:
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


def _tell(halving: Any, name: str, outcome: Mapping[str, Any], band: tuple[float, float]) -> None:
    """Tell the successive halving about the validations of a trial that has ended."""
    validations = [Validation(step=one["step"], scores=one["scores"]) for one in outcome["validations"]]
    ranks = [rank(one, band) for one in validations]
    ray.get(halving.goes_on.remote(name, [one.step for one in validations], ranks))


def _seen(point: Point, outcome: Mapping[str, Any] | None, num_steps: int) -> Seen:
    if outcome is None:
        return Seen(point=point, tau_mean=math.nan, loss=math.nan, share=1.0)
    share = outcome["num_steps"] / num_steps if outcome["stopped"] else 1.0
    return Seen(point=point, tau_mean=tau_mean(outcome), loss=loss_of(outcome["validation"]), share=share)


def _band_rule(config: TrainingConfig, band: tuple[float, float]) -> BandRule:
    tau_min, tau_max = config.temperature.tau_range  # type: ignore[attr-defined]  # both kinds have it
    return BandRule(band=band, tau_min=tau_min, tau_max=tau_max, num_steps=config.run.num_steps)
