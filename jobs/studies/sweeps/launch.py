"""Running a sweep as trials: checks, Ray, data preparation, MLflow, and the report at the end."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from jobs.engine.cluster import start_ray
from jobs.engine.launch import claim_directory
from jobs.engine.preflight import check_directory, check_machine, check_room
from jobs.engine.tracking import TrackedRun
from jobs.studies.sweeps.generations import make_generations
from jobs.studies.sweeps.objective import TITLE, loss_of
from jobs.studies.sweeps.plan import Sweep
from jobs.studies.sweeps.report import Row, as_markdown, as_page, best_values, choose, make_row
from jobs.studies.sweeps.round_record import RoundRecord
from jobs.studies.sweeps.rounds import make_rounds, tau_mean
from jobs.studies.trials.command import Results
from jobs.studies.trials.parent import open_parent, publish
from jobs.studies.trials.prepare import prepare_once
from jobs.studies.trials.run import DRIVER_CPUS, find_room, run_trials
from jobs.studies.trials.side_by_side import run_side_by_side
from jobs.studies.trials.trial import Outcomes

BEST_RUN_TAG = "best_run"
"""Tag of the sweep's MLflow run: name of the chosen trial, which is one of its child runs."""


def check_sweep(sweep: Sweep) -> None:
    """Check that a sweep can be started.

    Raises:
        ValueError, OSError: see `jobs.engine.preflight`.
    """
    check_directory(sweep.config)
    check_machine()
    check_room(sweep.config.base, sweep.first.data_cpus + DRIVER_CPUS)


def run_sweep(sweep: Sweep) -> Results[Row]:
    """Run or continue a sweep, and write `results.md`, `results.json` and `report.html` into its directory.

    Raises:
        ValueError: if another configuration has taken the name, or the cluster is too small.
    """
    config = sweep.config
    check_sweep(sweep)
    print(sweep.describe(), flush=True)
    start_ray()
    # raises ValueError before data are prepared
    find_room(config.base, sweep.first.data_cpus, config.sweep.num_concurrent)
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
    record = RoundRecord(config.run.directory)
    rounds = (make_generations if config.sweep.is_population else make_rounds)(sweep, record)
    if sweep.shares_base:
        outcomes = run_side_by_side(
            next(rounds, ()),
            num_at_once=config.sweep.num_side_by_side,
            directory=config.run.directory,
            parent=parent,
            describe=_describe_outcome,
        )
    else:
        outcomes = run_trials(
            rounds,
            length=config.sweep.length,
            directory=config.run.directory,
            parent=parent,
            num_concurrent=config.sweep.num_concurrent,
            data_cpus=sweep.first.data_cpus,
            describe=_describe_outcome,
        )
    return _publish(sweep, parent, record, outcomes)


def _publish(sweep: Sweep, parent: TrackedRun | None, record: RoundRecord, outcomes: Outcomes) -> Results[Row]:
    """Save the failures, write the results of all trials, log them to the parent run, and return them."""
    config, band = sweep.config, sweep.config.sweep.band
    failed = {**record.final_failures, **outcomes.failed}
    record.save(failed)
    rows = [
        make_row(name, point, outcomes.finished.get(name), failed.get(name, ""), band)
        for name, point in record.points.items()
    ]
    best, _ = choose(rows, band)
    num_combinations = math.prod(map(len, config.sweep.values.values()))
    return publish(
        config.run,
        parent,
        rows=rows,
        table=as_markdown(rows, band, num_combinations * config.base.run.num_steps),
        content={
            "configuration": dataclasses.asdict(config),
            "rows": [dataclasses.asdict(row) for row in rows],
        },
        files={"report.html": as_page(config.run.name, rows, band)},
        metrics={
            "num_in_band": sum(row.is_in_band for row in rows),
            "num_failed": len(failed),
            "num_steps": sum(row.num_steps for row in rows),
            **best_values(config.sweep.values, best),
        },
        tags={BEST_RUN_TAG: best.name} if best else None,
        failed=failed,
    )


def _describe_outcome(outcome: Mapping[str, Any]) -> str:
    stopped = f"; stopped: {outcome['stopped']}" if outcome["stopped"] else ""
    return f"mean τ {tau_mean(outcome):.4f}, {TITLE} {loss_of(outcome['validation']):.4f}{stopped}"
