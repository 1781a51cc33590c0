"""The results of a cross-validation: a row per task and setting, and its fold-by-fold difference from cross-entropy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jobs.engine.description import markdown_table
from jobs.studies.estimates import Estimate, estimate
from jobs.tasks.classifier.config import CrossValidationConfig

BASELINE = "ce"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The results of one setting on one task; accuracies are from 0 to 100."""

    task: str
    setting: str
    accuracies: Sequence[float]
    """Accuracies of the finished cells."""
    num_failed: int
    accuracy: Estimate | None
    """Estimate of the accuracy; None if every cell failed."""
    difference: Estimate | None
    """Difference from the baseline, over the cells that both have; None if there are none."""
    num_better: int
    """Number of cells in which this setting is better than the baseline."""
    num_worse: int


def make_rows(config: CrossValidationConfig, outcomes: Mapping[str, Mapping[str, Any]]) -> list[Row]:
    """Returns the rows of all tasks and settings.

    Args:
        config: the configuration of the cross-validation.
        outcomes: name of a run → its outcome, for the cells that did not fail.
    """
    grid, rows = config.grid, []
    test_share = 1.0 / (grid.num_folds - 1)
    for task in config.tasks:
        by_setting: dict[str, dict[tuple[int, int], float]] = {}
        for setting in grid.settings:
            accuracies = by_setting.setdefault(setting.name, {})
            for seed in grid.seeds:
                for fold in range(grid.num_folds):
                    name = config.cell(task, setting, seed, fold).run.name
                    if name in outcomes:
                        accuracies[seed, fold] = 100.0 * outcomes[name]["validation"]["accuracy"]
        for setting_name, accuracies in by_setting.items():
            values = list(accuracies.values())
            baseline = by_setting.get(BASELINE, {}) if setting_name != BASELINE else {}
            differences = [value - baseline[cell] for cell, value in accuracies.items() if cell in baseline]
            rows.append(
                Row(
                    task=task or "file",
                    setting=setting_name,
                    accuracies=values,
                    num_failed=len(grid.seeds) * grid.num_folds - len(values),
                    accuracy=estimate(values, test_share) if values else None,
                    difference=estimate(differences, test_share) if differences else None,
                    num_better=int((np.array(differences) > 0).sum()),
                    num_worse=int((np.array(differences) < 0).sum()),
                )
            )
    return rows


def as_markdown(rows: Sequence[Row], config: CrossValidationConfig) -> str:
    """Returns the table, followed by mean differences and an explanation."""
    cells = [["task", "setting", "accuracy, %", "against ce", "p", "better / worse", "failed"]]
    for row in rows:
        difference = row.difference
        cells.append(
            [
                row.task,
                row.setting,
                _format(row.accuracy),
                _format(difference, sign="+"),
                "" if difference is None else f"{difference.p:.3f}",
                "" if difference is None else f"{row.num_better} / {row.num_worse}",
                str(row.num_failed),
            ]
        )
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


def _format(value: Estimate | None, *, sign: str = "") -> str:
    if value is None:
        return ""
    half = "" if np.isnan(value.half_width) else f" ± {value.half_width:.2f}"
    return f"{value.mean:{sign}.2f}{half}"
