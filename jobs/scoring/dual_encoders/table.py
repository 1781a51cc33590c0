"""The figures of all models as a Markdown table with one column per model and one row per figure."""

from __future__ import annotations

from dataclasses import dataclass, field

from jobs.scoring.dual_encoders.units import ModelSpec
from jobs.scoring.publishing import markdown_table

_TITLES = {
    "text_recall": "image → text R@",
    "image_recall": "text → image R@",
    "top": "top-",
    "mean_recall": "mean recall",
    "num_images": "images",
    "num_texts": "texts",
    "num_classes": "classes",
    "num_unreadable": "unreadable",
    "share_cut": "texts cut to the model's tokens",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """The column of one model."""

    model: ModelSpec
    metrics: dict[str, float] = field(default_factory=dict)
    """`<data set>/<figure>` → a share from 0 to 1, or a count."""


def markdown(columns: list[Column]) -> str:
    """Returns the table, with shares in per cent; the row of cut texts is left out if no text was cut."""
    rows = [["%", *(column.model.label for column in columns)]]
    for name in dict.fromkeys(name for column in columns for name in column.metrics):
        data, _, figure = name.partition("/")
        if figure == "share_cut" and not any(column.metrics[name] for column in columns):
            continue
        kind, _, k = figure.partition("@")
        rows.append([f"{data} {_TITLES[kind]}{k}", *(_cell(kind, column.metrics[name]) for column in columns)])
    return markdown_table(rows)


def _cell(kind: str, value: float) -> str:
    return f"{value:,.0f}" if kind.startswith("num_") else f"{100 * value:.2f}"
