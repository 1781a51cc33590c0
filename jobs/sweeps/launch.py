"""A sweep as trials: checks, Ray, data prepared once, MLflow, and the report at the end."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jobs.clip.config import ClipConfig
from jobs.clip.plan import make_plan as make_clip_plan
from jobs.cluster import start_ray
from jobs.language_models.plan import make_plan as make_language_model_plan
from jobs.sweeps.config import SweepConfig
from jobs.sweeps.report import Objective, Row, markdown, page, rows
from jobs.training.identity import configuration_hash
from jobs.training.launch import claim_directory, tracking_uri
from jobs.training.task import Plan
from jobs.trials.command import Results
from jobs.trials.parent import open_parent, publish
from jobs.trials.run import Trial, run_trials


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """What a configuration comes to, known before anything starts."""

    config: SweepConfig[Any]
    trials: list[tuple[dict[str, float], Any]]
    """Point and configuration of each."""
    make_plan: Callable[[Any], Plan]
    objective: Objective
    first: Plan
    """Of the first trial."""

    def describe(self) -> str:
        """For a person."""
        config, run = self.config, self.config.run
        axes = ", ".join(f"{name} {min(axis):g} to {max(axis):g}" for name, axis in config.sweep.values.items())
        return (
            f"sweep        {run.name} in {run.directory} (configuration {configuration_hash(config)})\n"
            f"trials       {len(self.trials)} ({config.sweep.search}): {axes}\n"
            f"looked for   a mean τ from {config.sweep.band[0]:g} to {config.sweep.band[1]:g}, then the best "
            f"{self.objective.title}\n\nThe first trial:\n{self.first.describe()}"
        )


def make_sweep(config: SweepConfig[Any]) -> Sweep:
    """Check everything that can be checked without Ray.

    Raises:
        ValueError, FileNotFoundError, OSError: naming the field, the value and what would be legal.
    """
    # The trials' own storage is no place for a database: they log where the whole does.
    uri = tracking_uri(config.base)
    tracking = dataclasses.replace(config.base.tracking, uri=uri, enabled=bool(uri))
    config = dataclasses.replace(config, base=dataclasses.replace(config.base, tracking=tracking))
    trials = config.trials()
    is_clip = isinstance(config.base, ClipConfig)
    make_plan: Callable[[Any], Plan] = make_clip_plan if is_clip else make_language_model_plan
    first, *_ = [make_plan(trial) for _, trial in trials]
    if is_clip:
        objective = Objective(score="mean_recall", title="mean recall", is_better_higher=True)
    else:
        objective = Objective(score="cross_entropy_tau", title="cross-entropy at τ", is_better_higher=False)
    return Sweep(config=config, trials=trials, make_plan=make_plan, objective=objective, first=first)


def run_sweep(sweep: Sweep) -> Results[Row]:
    """Run it to its end, or continue it; writes `results.md`, `results.json` and `report.html` into the run's directory.

    Raises:
        ValueError: for a taken name, or too small a cluster.
    """
    config, band, objective = sweep.config, sweep.config.sweep.band, sweep.objective
    claim_directory(config)
    print(sweep.describe(), flush=True)
    start_ray()
    prepared = sweep.first.prepare()  # what all trials then find
    parent = open_parent(
        config,
        run=config.run,
        tracking=config.base.tracking,
        uri=sweep.first.tracking_uri,
        num_trials=len(sweep.trials),
        data_sets=prepared.data_sets,
    )
    outcomes = run_trials(
        [Trial(config=trial, make_plan=sweep.make_plan) for _, trial in sweep.trials],
        directory=config.run.directory,
        parent_run_id=parent.run_id if parent else "",
        num_concurrent=config.sweep.num_concurrent,
        data_cpus=sweep.first.data_cpus,
        describe=lambda outcome: (
            f"mean τ {outcome['validation'].get('tau_mean', float('nan')):.4f}, {objective.title} "
            f"{outcome['validation'][objective.score]:.4f}"
        ),
    )
    named = [(trial.run.name, point) for point, trial in sweep.trials]
    found = rows(named, outcomes.finished, outcomes.failed, band, objective)
    table = markdown(found, band, objective)
    content = {
        "configuration": dataclasses.asdict(config),
        "rows": [dataclasses.asdict(row) for row in found],
    }
    publish(
        config.run,
        parent,
        files={
            "results.md": table + "\n",
            "results.json": json.dumps(content, indent=1),
            "report.html": page(config.run.name, found, band, objective),
        },
        metrics={"num_in_band": sum(row.is_in_band for row in found), "num_failed": len(outcomes.failed)},
        has_failed=bool(outcomes.failed),
    )
    return Results(
        rows=found,
        table=table,
        failed=outcomes.failed,
        directory=config.run.directory,
        tracking_uri=parent.uri if parent else "",
    )
