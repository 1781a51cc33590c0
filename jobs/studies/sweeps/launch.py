"""Running a sweep as trials of Ray Tune: checks, Ray, data preparation, MLflow, and the report at the end."""

from __future__ import annotations

import dataclasses
import io
import logging
import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import pandas as pd
from pyarrow.fs import FileSelector, FileType
from ray import tune
from ray.tune.experiment import Trial as TuneTrial
from ray.tune.search import BasicVariantGenerator
from ray.tune.search.optuna import OptunaSearch

from jobs.engine.cluster import check_machine, start_ray
from jobs.engine.config import TrainingConfig
from jobs.engine.console import clock
from jobs.engine.export import configure, find_checkpoint, make_late_export
from jobs.engine.fields import configuration_hash, flatten
from jobs.engine.launch import check_directory, check_room, claim_directory, make_plan, tracking_uri
from jobs.engine.lease import Lease
from jobs.engine.masking import masked
from jobs.engine.metrics import TrackedRun, send_metrics, survive_outage
from jobs.engine.resumption import best_checkpoint, whole_checkpoints
from jobs.engine.task import Plan
from jobs.engine.tracking import find_child, finish_run, mark_if_ended
from jobs.studies.sweeps.band_search import LOSS, TITLE, Point, describe_scores, is_wide, list_corners, search_grid
from jobs.studies.sweeps.config import SweepConfig, name_of, place_trial, with_values
from jobs.studies.sweeps.report import Row, as_markdown, as_page, best_values, choose, make_row
from jobs.studies.sweeps.trainable import HYPERPARAMETERS, make_trainable
from jobs.studies.sweeps.tuning import BandRule, BandSearch, RuleStopper, make_scheduler
from jobs.studies.trials import (
    DRIVER_CPUS,
    Results,
    Trial,
    describe_error,
    find_room,
    open_parent,
    prepare_once,
    publish,
    record_failures,
    run_trials,
    shares_base,
)
from jobs.tasks.language_model.config import LanguageModelConfig
from pipelines.storage import exists, read_json, resolve, write_json

BEST_RUN_TAG = "best_run"
"""Tag of the sweep's MLflow run: name of the chosen trial, which is one of its child runs."""

# Tune's own printing is not needed: runs have their own lines. Tune's handling of Ctrl-C is turned off, since it would end
# only the trials, which would then be reported as failed. Here Ctrl-C ends the job.
_TUNE_ENVIRONMENT = {
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_AIR_NEW_OUTPUT": "0",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
}


Runs: TypeAlias = dict[str, tuple[Point, dict[str, Any] | None]]
"""Name of a run → its point, and its outcome; None if it has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    config: SweepConfig[Any]
    plans: Sequence[Plan]
    """Plans of the first round's trials, followed by those of the trials at the ends of the axes."""

    @property
    def shares_base(self) -> bool:
        """Whether the trials train side by side on one frozen base."""
        sweep = self.config.sweep
        if sweep.scheduler != "none" or sweep.search not in ("grid", "random") or sweep.num_side_by_side == 1:
            return False
        return shares_base([self.config.trial(point) for point in next(self.config.start())])

    def describe(self) -> str:
        config, run = self.config, self.config.run
        axes = ", ".join(f"{name} {min(axis):g} to {max(axis):g}" for name, axis in config.sweep.values.items())
        limit = "at most " if config.sweep.search == "band" else ""
        early = "" if config.sweep.scheduler == "none" else f", scheduler {config.sweep.scheduler}"
        side_by_side = "side by side on one frozen base, " if self.shares_base else ""
        return (
            f"sweep        {run.name} in {run.directory} (configuration {configuration_hash(config)})\n"
            f"trials       {side_by_side}{limit}{config.sweep.max_num_trials} ({config.sweep.search}{early}): {axes}\n"
            f"goal         a mean τ from {config.sweep.band[0]:g} to {config.sweep.band[1]:g}, then the lowest "
            f"{TITLE}\n\nThe first trial:\n{self.plans[0].describe()}"
        )


def make_sweep(config: SweepConfig[Any]) -> Sweep:
    """Make the plan; raises an error that names the field, its value and the legal values."""
    # The trials log to the MLflow store of the sweep; by default they would create a database in their own storage.
    uri = tracking_uri(config.base)
    tracking = dataclasses.replace(config.base.tracking, uri=uri, enabled=bool(uri))
    config = dataclasses.replace(config, base=dataclasses.replace(config.base, tracking=tracking))
    trials = [config.trial(point) for point in [*next(config.start()), *list_corners(config.sweep.values)]]
    return Sweep(config=config, plans=[make_plan(trial) for trial in trials])


def check_sweep(sweep: Sweep) -> None:
    """Check that a sweep can be started; raises as `jobs.engine.launch` does."""
    check_directory(sweep.config)
    check_machine()
    check_room(sweep.config.base, sweep.plans[0].data_cpus + DRIVER_CPUS)


def run_sweep(sweep: Sweep) -> Results[Row]:
    """Run or continue a sweep, and write its report and `trials.parquet` into its directory."""
    config = sweep.config
    check_sweep(sweep)
    print(sweep.describe(), flush=True)
    start_ray()
    # raises ValueError before data are prepared
    num_at_once = find_room(config.base, sweep.plans[0].data_cpus, config.sweep.num_concurrent)
    data_sets = prepare_once(sweep.plans)
    claim_directory(config)
    parent = open_parent(
        config,
        config.base.tracking,
        uri=sweep.plans[0].tracking_uri,
        num_trials=config.sweep.max_num_trials,
        data_sets=data_sets,
    )
    if sweep.shares_base:
        configs = [config.trial(point) for point in next(config.start())]
        outcomes = run_trials(
            [Trial(config=trial) for trial in configs],
            directory=config.run.directory,
            parent=parent,
            describe=lambda outcome: describe_scores(outcome["validation"]),
            num_side_by_side=config.sweep.num_side_by_side,
        )
        found = _read_runs(config)
        runs = {name_of(point): found.get(name_of(point), (point, None)) for point in next(config.start())}
        return _publish(sweep, parent, runs, outcomes.failed, _table_of(config, runs))
    with Lease(config.run.directory), mark_if_ended(parent):
        runs, errors, table = _run_tune(sweep, parent, num_at_once)
    return _publish(sweep, parent, runs, errors, table)


def _run_tune(sweep: Sweep, parent: TrackedRun | None, num_at_once: int) -> tuple[Runs, dict[str, str], pd.DataFrame]:
    """Run the trials with Ray Tune; return their runs, name → error of those that failed, and Tune's table of trials."""
    config, section = sweep.config, sweep.config.sweep
    os.environ |= _TUNE_ENVIRONMENT
    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)
    num_steps = config.base.run.num_steps
    settings: dict[str, Any]
    space = _hyperparameters(config.base)
    search: BandSearch | None = None
    if section.search == "band":
        search = BandSearch(
            section.values,
            band=section.band,
            num_steps=num_steps,
            budget=section.budget,
            start=_calibrate_rho(sweep),
            slope=config.slope,
            whole=config.whole_axes,
        )
        settings = {"search_alg": search, "num_samples": -1}
    elif section.search == "optuna":
        space |= {field: _domain(values, field in config.whole_axes) for field, values in section.values.items()}
        # Trials that were begun before go on, and those that are finished report again, for Optuna to learn from.
        begun = sorted(_read_runs(config).values(), key=lambda run: run[1] is None)
        kind = {field: int if field in config.whole_axes else float for field in section.values}
        points = [{field: kind[field](value) for field, value in point.items()} for point, _ in begun]
        # With the seed of the beginning, Optuna would draw the points of the beginning again.
        seed = section.seed + len(points)
        optuna = OptunaSearch(metric=LOSS, mode="min", seed=seed, points_to_evaluate=points or None)
        settings = {"search_alg": optuna, "num_samples": section.num_trials}
    else:
        points = next(config.start())
        space |= {field: tune.choice(values) for field, values in section.values.items()}
        settings = {
            "search_alg": BasicVariantGenerator(points_to_evaluate=points, max_concurrent=num_at_once),
            "num_samples": len(points),
            "max_concurrent_trials": None,  # which Tune ignores beside a generator
        }
    scheduler = make_scheduler(section.scheduler, num_steps, section.values, section.num_generations)
    filesystem, path = resolve(config.run.directory)
    finished = [name for name, (_, outcome) in _read_runs(config).items() if outcome is not None]
    stopper = RuleStopper(_band_rule(sweep), search, finished)
    print(f"trials finished before: {len(finished)}, in {config.run.directory}", flush=True)
    # A trial may start from what another has left a generation ago.
    num_shared = 2 + num_steps // config.base.validation.every // section.num_generations
    tuner = tune.Tuner(
        make_trainable(
            config.base,
            named=tuple(section.values),
            num_at_once=num_at_once,
            parent_run_id=parent.run_id if parent else "",
            num_shared=num_shared if section.scheduler == "pbt" else 0,
        ),
        param_space=space,
        tune_config=tune.TuneConfig(scheduler=scheduler, **{"max_concurrent_trials": num_at_once, **settings}),
        run_config=tune.RunConfig(
            name="tune",
            storage_path=path,
            storage_filesystem=filesystem,
            verbose=0,
            stop=stopper,
            callbacks=[_ProgressLines(section.max_num_trials)],
        ),
    )
    grid = tuner.fit()
    results = [grid[number] for number in range(len(grid))]
    runs, errors, reasons = match_runs(results, _read_runs(config), section.values, stopper.reasons)
    usual = f"ended early by {type(scheduler).__name__}" if scheduler else "ended early"
    for name, (_, outcome) in runs.items():
        if outcome is None and name not in errors:
            runs[name] = runs[name][0], _finish_stopped(config, name, reasons.get(name, usual), parent)
    record_failures(parent, errors)
    return runs, errors, grid.get_dataframe()


def match_runs(
    results: Sequence[Any], found: Runs, axes: Iterable[str], reasons: Mapping[str, str]
) -> tuple[Runs, dict[str, str], dict[str, str]]:
    """Return the runs in the order of Tune's results, and by their names errors and reasons of those that ended early.

    `reasons` has the IDs of trials. A trial that went on from another's checkpoint is a run of its own, whose name begins
    with that of its values.
    """
    runs, errors, early = Runs(), dict[str, str](), dict[str, str]()
    for result in results:
        point = {field: float(result.config[field]) for field in axes}
        name = name_of(point)
        own = [run for run in found if run == name or run.startswith(f"{name}-from-")]
        runs |= {run: found[run] for run in own} or {name: (point, None)}
        ended = [run for run in own if found[run][1] is None] or [name]
        if result.error is not None:
            errors |= dict.fromkeys(ended, describe_error(result.error))
        elif reason := reasons.get((result.metrics or {}).get("trial_id", "")):
            early |= dict.fromkeys(ended, reason)
    return runs | {name: found[name] for name in sorted(found) if name not in runs}, errors, early


def _table_of(config: SweepConfig[Any], runs: Runs) -> pd.DataFrame:
    """Return a table as Tune's, with a row for every run."""
    rows = []
    for point, outcome in runs.values():
        values = _hyperparameters(config.base) | point
        scores = outcome["validation"] | {"step": outcome["num_steps"]} if outcome else {}
        rows.append(scores | {f"config/{field}": value for field, value in values.items()})
    return pd.DataFrame(rows)


def _hyperparameters(config: TrainingConfig) -> dict[str, Any]:
    values = flatten(config)
    return {field: values[field] for field in HYPERPARAMETERS if values.get(field) is not None}


def _domain(values: list[float], is_whole: bool) -> Any:
    """Return what Tune draws from between the ends of an axis: log-uniformly if the larger is at least 10 times the other."""
    low, high = min(values), max(values)
    if is_whole:
        return (tune.lograndint if is_wide(values) else tune.randint)(int(low), int(high) + 1)
    return (tune.loguniform if is_wide(values) else tune.uniform)(low, high)


def _band_rule(sweep: Sweep) -> BandRule | None:
    """Return the rule that ends trials which cannot end in the band; None if the sweep ends none, or τ is not free."""
    config, section = sweep.config, sweep.config.sweep
    temperature = config.base.temperature
    if not temperature.has_free_tau or (section.search != "band" and section.scheduler not in ("asha", "median")):
        return None
    tau_min, tau_max = temperature.tau_range
    return BandRule(band=section.band, tau_min=tau_min, tau_max=tau_max, num_steps=config.base.run.num_steps)


def _calibrate_rho(sweep: Sweep) -> float | None:
    """Return the ρ whose mean optimal temperature is in the middle of the band, if a frozen language model shows it."""
    config = sweep.config
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
    prepared = make_plan(dataclasses.replace(base, temperature=temperature)).prepare()
    prepared.write_records(config.run.directory)  # so that a continued search begins with the same ρ
    return float(prepared.outcome["rho"])


def _read_runs(config: SweepConfig[Any]) -> Runs:
    """Return the runs in the sweep's directory: name → point, and the outcome if it has one."""
    filesystem, path = resolve(config.run.directory)
    runs: Runs = {}
    for entry in filesystem.get_file_info(FileSelector(path, allow_not_found=True)):
        if entry.type != FileType.Directory:
            continue
        directory = f"{config.run.directory}/{entry.base_name}"
        held = read_json(f"{directory}/configuration.json")
        if held is not None and all(field in held for field in config.sweep.values):
            point = {field: float(held[field]) for field in config.sweep.values}
            runs[entry.base_name] = point, read_json(f"{directory}/outcome.json")
    return runs


def _finish_stopped(
    config: SweepConfig[Any], name: str, reason: str, parent: TrackedRun | None
) -> dict[str, Any] | None:
    """Write the outcome of a run that Tune has ended early, from its newest checkpoint; None if it has none."""
    directory = f"{config.run.directory}/{name}"
    whole = list(whole_checkpoints(directory))
    state = read_json(f"{directory}/{whole[-1]}/state.json") if whole else None
    if state is None or not state["validations"]:
        return None
    child = find_child(parent, name) if parent else None
    held = read_json(f"{directory}/configuration.json") or {}
    validations = [{"step": step, "scores": scores} for step, scores in state["validations"]]
    outcome = {
        "run": name,
        "directory": directory,
        "export": f"{directory}/export",
        "num_steps": state["step"],
        "started_at_step": int(str(held.get("run.start_from", "")).rpartition("@")[2] or 0),
        "stopped": reason,
        "validation": validations[-1]["scores"],
        "validations": validations,
        "best_rating": state["best_rating"],
        "seconds_trained": state["seconds_trained"],
        "world_size": state["world_size"],
        "mlflow_run_id": child.run_id if child else None,
        "mlflow_experiment_id": child.experiment_id if child else None,
        "tracking_uri": masked(child.uri) if child else "",
    }
    write_json(f"{directory}/outcome.json", outcome)
    if child:
        with survive_outage(f"the end of {name}"):
            send_metrics(child, state["unsent_metrics"])
            finish_run(child, status="FINISHED", artifacts=None, metrics={}, tags={"stopped": reason})
    print(f"{name} was stopped after {state['step']} steps: {reason}", flush=True)
    return outcome


def _export_best(sweep: Sweep, best: Row | None) -> None:
    """Export the best trial from its best checkpoint if it was ended early, so that nothing else has exported it whole."""
    if best is None or not best.stopped:
        return
    config = sweep.config
    directory = f"{config.run.directory}/{best.name}"
    output = f"{config.run.directory}/export"
    checkpoint = best_checkpoint(directory)
    if not checkpoint or exists(output):
        return
    trial = place_trial(with_values(config.base, best.point), config.run, best.name)
    late = find_checkpoint(directory, int(checkpoint.rpartition("-")[2]), output)
    make_late_export(make_plan(configure(trial, late)), late)
    print(f"  model     {output}", flush=True)


class _ProgressLines(tune.Callback):
    def __init__(self, num_trials: int) -> None:
        self._num_trials, self._num_ended, self._started = num_trials, 0, time.monotonic()

    def on_trial_complete(self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, **info: Any) -> None:
        scores = trial.last_result
        self._print_line(trial, f"{describe_scores(scores)}, step {scores.get('step', 0)}")

    def on_trial_error(self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, **info: Any) -> None:
        self._print_line(trial, "FAILED")

    def _print_line(self, trial: TuneTrial, text: str) -> None:
        self._num_ended += 1
        passed = clock(time.monotonic() - self._started)
        values = ", ".join(f"{field} {value:.6g}" for field, value in sorted(trial.config.items()))
        print(f"trial {self._num_ended} of at most {self._num_trials} after {passed}: {values}: {text}", flush=True)


def _publish(
    sweep: Sweep, parent: TrackedRun | None, runs: Runs, errors: Mapping[str, str], table: pd.DataFrame
) -> Results[Row]:
    """Write the results of all trials, log them to the parent run, export the best one, and return them."""
    config, band = sweep.config, sweep.config.sweep.band
    rows = [make_row(name, point, outcome, errors.get(name, ""), band) for name, (point, outcome) in runs.items()]
    best, _ = choose(rows, band)
    grid = next(search_grid(config.sweep.values)) if config.sweep.search in ("grid", "band") else []
    num_grid_steps = sum(with_values(config.base, point).run.num_steps for point in grid)
    content = io.BytesIO()
    table.to_parquet(content)
    results = publish(
        config,
        parent,
        rows=rows,
        table=as_markdown(rows, band, num_grid_steps),
        content={"rows": [dataclasses.asdict(row) for row in rows]},
        files={"report.html": as_page(config.run.name, rows, band), "trials.parquet": content.getvalue()},
        metrics={
            "num_in_band": sum(row.is_in_band for row in rows),
            "num_failed": len(errors),
            "num_steps": sum(row.num_steps for row in rows),
            **best_values(config.sweep.values, best),
        },
        tags={BEST_RUN_TAG: best.name} if best else None,
        failed=errors,
    )
    _export_best(sweep, best)
    return results
