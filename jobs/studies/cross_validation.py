"""A cross-validation of classifiers as trials, and its table: a row per task and setting, with the difference from `ce`."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jobs.engine.cluster import check_machine, start_ray
from jobs.engine.fields import configuration_hash
from jobs.engine.launch import check_directory, check_room, claim_directory, tracking_uri
from jobs.engine.report import markdown_table
from jobs.studies.estimates import Estimate, estimate
from jobs.studies.trials import DRIVER_CPUS, Results, Trial, open_parent, publish, run_trials
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
        grid, run = self.config.grid, self.config.run
        settings, more = ", ".join(setting.name for setting in grid.settings[:3]), len(grid.settings) - 3
        return (
            f"run          {run.name} in {run.directory} (configuration {configuration_hash(self.config)})\n"
            f"cells        {len(self.config.tasks)} tasks × {len(grid.settings)} settings × {len(grid.seeds)} seeds × "
            f"{grid.num_folds} folds = {len(self.cells)}\n"
            f"settings     {settings}{f' and {more} more' if more > 0 else ''}\n\nA cell of every task:\n"
            + "\n".join(plan.describe() + "\n" for plan in self.examples)
        )


def make_cross_validation(config: CrossValidationConfig) -> CrossValidation:
    """Make the plan; raises an error that names the field, its value and the legal values."""
    # The cells log to the MLflow store of the whole; by default they would create a database in their own storage.
    uri = tracking_uri(config)
    tracking = dataclasses.replace(config.tracking, uri=uri, enabled=bool(uri))
    config = dataclasses.replace(config, tracking=tracking)
    hardest = config.grid.settings[-1]
    examples = [make_plan(config.cell(task, hardest, config.grid.seeds[0], 0)) for task in config.tasks]
    return CrossValidation(config=config, cells=config.cells(), examples=examples)


def check_cross_validation(work: CrossValidation) -> None:
    """Check that a cross-validation can be started; raises as `jobs.engine.launch` does."""
    check_directory(work.config)
    check_machine()
    for plan in work.examples:
        check_room(plan.config, plan.data_cpus + DRIVER_CPUS)


def cross_validate(work: CrossValidation) -> Results[Row]:
    """Run or continue a cross-validation, and write `results.md` and `results.json` into its directory."""
    config = work.config
    check_cross_validation(work)
    claim_directory(config)
    print(work.describe(), flush=True)
    start_ray()
    parent = open_parent(
        config,
        config.tracking,
        uri=work.examples[0].tracking_uri,
        num_trials=len(work.cells),
        data_sets={plan.data.name: plan.prepare().data_sets["training"] for plan in work.examples},
    )
    outcomes = run_trials(
        [Trial(config=cell, keep_checkpoints=config.grid.keep_models) for cell in work.cells],
        directory=config.run.directory,
        parent=parent,
        describe=lambda outcome: f"{outcome['validation']['accuracy']:.2%}",
        num_concurrent=config.grid.num_concurrent,
        data_cpus=work.examples[0].data_cpus,
    )
    rows = make_rows(config, outcomes.finished)
    cells = {
        name: {"accuracy": outcome["validation"]["accuracy"], "confusion": outcome["confusion"]}
        for name, outcome in outcomes.finished.items()
    }
    return publish(
        config,
        parent,
        rows=rows,
        table=as_markdown(rows, config),
        content={"rows": [dataclasses.asdict(row) for row in rows], "cells": cells},
        metrics={f"accuracy/{row.task}/{row.setting}": row.accuracy.mean for row in rows if row.accuracy is not None},
        failed=outcomes.failed,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The results of one setting on one task; accuracies are from 0 to 100."""

    task: str
    setting: str
    accuracies: Sequence[float]
    num_failed: int
    accuracy: Estimate | None
    """Estimate of the accuracy; None if every cell failed."""
    difference: Estimate | None
    """Difference from the baseline, over the cells that both have; None if there are none."""
    num_better: int
    """Number of cells in which this setting is better than the baseline."""
    num_worse: int


def make_rows(config: CrossValidationConfig, outcomes: Mapping[str, Mapping[str, Any]]) -> list[Row]:
    """Returns the rows of all tasks and settings, from the outcomes of the runs that did not fail by name."""
    grid, rows = config.grid, []
    test_share = 1.0 / (grid.num_folds - 1)
    replicates = list(itertools.product(grid.seeds, range(grid.num_folds)))
    for task in config.tasks:
        baseline: dict[tuple[int, int], float] = {}
        for setting in grid.settings:
            found = {}
            for seed, fold in replicates:
                if outcome := outcomes.get(config.cell(task, setting, seed, fold).run.name):
                    found[seed, fold] = 100.0 * outcome["validation"]["accuracy"]
            values = list(found.values())
            differences = [value - baseline[cell] for cell, value in found.items() if cell in baseline]
            if setting.name == "ce":
                baseline = found
            rows.append(
                Row(
                    task=task or "file",
                    setting=setting.name,
                    accuracies=values,
                    num_failed=len(replicates) - len(values),
                    accuracy=estimate(values, test_share) if values else None,
                    difference=estimate(differences, test_share) if differences else None,
                    num_better=sum(one > 0 for one in differences),
                    num_worse=sum(one < 0 for one in differences),
                )
            )
    return rows


def as_markdown(rows: Sequence[Row], config: CrossValidationConfig) -> str:
    """Returns the table, followed by mean differences and an explanation."""
    cells = [["task", "setting", "accuracy, %", "against ce", "p", "better / worse", "failed"]]
    for row in rows:
        accuracy = row.accuracy.text() if row.accuracy else ""
        against = ["", "", ""]
        if row.difference:
            against = [row.difference.text(sign="+"), f"{row.difference.p:.3f}", f"{row.num_better} / {row.num_worse}"]
        cells.append([row.task, row.setting, accuracy, *against, str(row.num_failed)])
    lines = [markdown_table(cells), ""]
    for setting in config.grid.settings:
        means = [row.difference.mean for row in rows if row.setting == setting.name and row.difference is not None]
        if len(means) > 1:
            lines.append(f"Mean difference of {setting.name} over {len(means)} tasks: {np.mean(means):+.2f}")
    grid = config.grid
    lines.append(
        f"{len(grid.seeds)} seeds × {grid.num_folds} folds; differences are taken cell by cell. ± is half the 95 % interval, "
        "p that of no difference, by the corrected resampled t-test (Nadeau & Bengio 2003), as training sets overlap."
    )
    if len(grid.settings) - grid.with_baseline > 1:
        lines.append(
            "The best of several settings is chosen on the folds that score it, so its accuracy is too optimistic."
        )
    return "\n".join(lines)
