"""Running a cross-validation as trials: checks, Ray, MLflow, and the table at the end."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from jobs.engine.cluster import check_machine, start_ray
from jobs.engine.identity import configuration_hash
from jobs.engine.launch import claim_directory, tracking_uri
from jobs.engine.preflight import check_directory, check_room
from jobs.engine.task import data_set
from jobs.studies.cross_validation.table import Row, as_markdown, make_rows
from jobs.studies.trials.command import Results
from jobs.studies.trials.parent import open_parent, publish
from jobs.studies.trials.run import DRIVER_CPUS, Trial, one_round, run_trials
from jobs.tasks.classifier.config import ClassifierConfig, CrossValidationConfig
from jobs.tasks.classifier.plan import ClassifierPlan, make_plan


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossValidation:
    """The plan of a cross-validation, known before anything starts."""

    config: CrossValidationConfig
    cells: list[ClassifierConfig]
    examples: list[ClassifierPlan]
    """Plans of one cell of every task."""

    def describe(self) -> str:
        """Returns the plan as text for the terminal."""
        grid, run = self.config.grid, self.config.run
        settings = ", ".join(setting.name for setting in grid.settings[:3])
        more = len(grid.settings) - 3
        return "\n".join(
            [
                f"run          {run.name} in {run.directory} (configuration {configuration_hash(self.config)})",
                f"cells        {len(self.config.tasks)} tasks × {len(grid.settings)} settings × {len(grid.seeds)} seeds × "
                f"{grid.num_folds} folds = {len(self.cells)}",
                f"settings     {settings}{f' and {more} more' if more > 0 else ''}",
                "",
                "A cell of every task:",
                *(plan.describe() + "\n" for plan in self.examples),
            ]
        )


def make_cross_validation(config: CrossValidationConfig) -> CrossValidation:
    """Check everything that can be checked without Ray.

    Raises:
        ValueError, FileNotFoundError, OSError, TooManyProblemsError: naming the field, its value and the legal values.
    """
    # The cells log to the MLflow store of the whole; by default they would create a database in their own storage.
    uri = tracking_uri(config)
    tracking = dataclasses.replace(config.tracking, uri=uri, enabled=bool(uri))
    config = dataclasses.replace(config, tracking=tracking)
    hardest = config.grid.settings[-1]
    examples = [make_plan(config.cell(task, hardest, config.grid.seeds[0], 0)) for task in config.tasks]
    return CrossValidation(config=config, cells=config.cells(), examples=examples)


def check_cross_validation(work: CrossValidation) -> None:
    """Check that a cross-validation can be started.

    Raises:
        ValueError, OSError: see `jobs.engine.preflight`.
    """
    check_directory(work.config)
    check_machine()
    for plan in work.examples:
        check_room(plan.config, plan.data_cpus + DRIVER_CPUS)


def cross_validate(work: CrossValidation) -> Results[Row]:
    """Run or continue a cross-validation, and write `results.md` and `results.json` into its directory.

    Raises:
        ValueError: if another configuration has taken the name, or the cluster is too small.
    """
    config = work.config
    check_cross_validation(work)
    claim_directory(config)
    print(work.describe(), flush=True)
    start_ray()
    parent = open_parent(
        config,
        run=config.run,
        tracking=config.tracking,
        uri=work.examples[0].tracking_uri,
        num_trials=len(work.cells),
        data_sets={
            plan.data_name: data_set(f"{config.data.file or config.data.directory}/{plan.data_name}", plan.data_digest)
            for plan in work.examples
        },
    )
    outcomes = run_trials(
        one_round(
            [Trial(config=cell, make_plan=make_plan, keep_checkpoints=config.grid.keep_models) for cell in work.cells]
        ),
        length=len(work.cells),
        directory=config.run.directory,
        parent=parent,
        num_concurrent=config.grid.num_concurrent,
        data_cpus=work.examples[0].data_cpus,
        describe=lambda outcome: f"{outcome['validation']['accuracy']:.2%}",
    )
    rows = make_rows(config, outcomes.finished)
    return publish(
        config.run,
        parent,
        rows=rows,
        table=as_markdown(rows, config),
        content={
            "configuration": dataclasses.asdict(config),
            "rows": [dataclasses.asdict(row) for row in rows],
            "cells": {
                name: {"accuracy": outcome["validation"]["accuracy"], "confusion": outcome["confusion"]}
                for name, outcome in outcomes.finished.items()
            },
        },
        metrics={f"accuracy/{row.task}/{row.setting}": row.accuracy.mean for row in rows if row.accuracy is not None},
        failed=outcomes.failed,
    )
