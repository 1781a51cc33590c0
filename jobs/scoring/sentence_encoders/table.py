"""The figures of all models as a Markdown table with one column per model and one row per figure."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

from jobs.scoring.publishing import markdown_table
from jobs.scoring.sentence_encoders.cells import ModelSpec

_TITLES = {
    "accuracy": "accuracy",
    "spearman": "Spearman",
    "pearson": "Pearson",
    "num_sentences": "sentences",
    "num_pairs": "pairs",
    "num_unreadable": "unreadable",
    "share_cut": "cut to the model's tokens",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """The column of one model."""

    model: ModelSpec
    metrics: dict[str, float] = field(default_factory=dict)
    """`<data>/<figure>` → a share from 0 to 1, a correlation, or a count."""

    @property
    def mean_accuracy(self) -> float | None:
        """Mean accuracy over the tasks, from 0 to 1; None if there are no tasks."""
        accuracies = [value for name, value in self.metrics.items() if name.endswith("/accuracy")]
        return statistics.fmean(accuracies) if accuracies else None


def markdown(columns: list[Column]) -> str:
    """Returns the table, with shares and correlations in per cent.

    A row that counts unreadable lines or cut texts is left out if it would be 0 for every model.
    """
    rows = [["%", *(column.model.label for column in columns)]]
    for name in dict.fromkeys(name for column in columns for name in column.metrics):
        data, _, figure = name.partition("/")
        if figure in ("num_unreadable", "share_cut") and not any(column.metrics[name] for column in columns):
            continue
        rows.append([f"{data} {_TITLES[figure]}", *(_cell(figure, column.metrics[name]) for column in columns)])
    means = [column.mean_accuracy for column in columns]
    if all(mean is not None for mean in means):
        rows.append(["mean accuracy", *(_cell("accuracy", mean or 0.0) for mean in means)])
    return markdown_table(rows)


def _cell(figure: str, value: float) -> str:
    return f"{value:,.0f}" if figure.startswith("num_") else f"{100 * value:.2f}"
