"""The results of an evaluation, models side by side: a Markdown table, JSON beside it, and runs in MLflow."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jobs.engine.identity import flatten
from jobs.engine.masking import masked
from jobs.engine.tables import markdown_table
from jobs.engine.tracking import TrackedRun, finish_run, open_run, resolve_uri, survive_outage
from jobs.scoring.config import EvaluationConfig
from jobs.scoring.models import ModelSpec
from jobs.scoring.stages import ScoringFailedError
from pipelines.storage import resolve


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column of the table, which is also one MLflow run."""

    title: str
    parameters: Mapping[str, Any]
    """What distinguishes the column from others: the model, and for a language model TempNet and temperature."""
    metrics: dict[str, float] = field(default_factory=dict)
    """`<data>/<figure>` → value."""

    @classmethod
    def of_model(cls, model: ModelSpec) -> Column:
        """Returns the empty column of a model."""
        return cls(title=model.label, parameters={"model": model.path})


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """The figures of an evaluation."""

    columns: Sequence[Column]
    table: str
    """The table as Markdown."""


def percent_table(columns: Sequence[Column], titles: Mapping[str, str], *, hidden_if_zero: Sequence[str] = ()) -> str:
    """Returns a table with one row per figure: shares and correlations in per cent, and counts (`num_…`) as they are.

    Args:
        columns: the columns, with figures named `<data>/<figure>` or `<data>/<figure>@<k>`.
        titles: figure → what the row is called.
        hidden_if_zero: figures whose row is left out if it would be 0 in every column.
    """

    def cell(figure: str, value: float | None) -> str:
        if value is None:
            return "–"
        return f"{value:,.0f}" if figure.startswith("num_") else f"{100 * value:.2f}"

    rows = [["%", *(column.title for column in columns)]]
    for name in dict.fromkeys(name for column in columns for name in column.metrics):
        data, _, figure = name.rpartition("/")
        figure, _, k = figure.partition("@")
        if figure in hidden_if_zero and not any(column.metrics.get(name) for column in columns):
            continue
        title = f"{data} {titles[figure]}{k}".strip()
        rows.append([title, *(cell(figure, column.metrics.get(name)) for column in columns)])
    return markdown_table(rows)


def publish(
    config: EvaluationConfig,
    *,
    columns: Sequence[Column],
    render: Callable[[Sequence[Column]], str],
    identity: Sequence[str],
    failed: Mapping[str, str] | None = None,
) -> Results:
    """Write `results.md` and `results.json` into the evaluation's directory, and log them to MLflow.

    MLflow gets a parent run for the whole evaluation and a child run for every column. Publishing the same evaluation
    again updates the same MLflow runs.

    Args:
        config: the configuration of the evaluation; it is stored with the results.
        columns: the figures.
        render: makes the table of the columns.
        identity: strings that together decide the figures, such as the keys of all units of work. MLflow runs are
            recognised by their hash.
        failed: title → reason for every unit that failed, so that figures are missing from the table.

    Raises:
        ScoringFailedError: if units failed; it holds the table.
    """
    table, failed = render(columns), failed or {}
    results = {
        "configuration": dataclasses.asdict(config),
        "columns": [
            {
                **{name: value or None for name, value in column.parameters.items()},
                "title": column.title,
                "metrics": {name: value if math.isfinite(value) else None for name, value in column.metrics.items()},
            }
            for column in columns
        ],
        "failed": dict(failed),
    }
    text = "\n".join([table, *(f"\nFAILED: {title}: {reason}" for title, reason in failed.items())])
    with tempfile.TemporaryDirectory() as name:
        local = Path(name)
        (local / "results.md").write_text(text + "\n", encoding="utf-8")
        (local / "results.json").write_text(json.dumps(masked(results), indent=1, ensure_ascii=False), encoding="utf-8")
        filesystem, path = resolve(config.run.directory)
        for file in local.iterdir():
            with filesystem.open_output_stream(f"{path}/{file.name}") as stream:
                stream.write(file.read_bytes())
        with survive_outage("the evaluation"):
            if uri := resolve_uri(config.tracking, config.run.resolved_storage):
                _track(config, uri, columns, identity, local, "FAILED" if failed else "FINISHED")
    if failed:
        raise ScoringFailedError(failed, table)
    return Results(columns=columns, table=table)


def _track(
    config: EvaluationConfig,
    uri: str,
    columns: Sequence[Column],
    identity: Sequence[str],
    artifacts: Path,
    status: str,
) -> None:
    def start(name: str, identity: Sequence[str], parameters: Mapping[str, Any], tags: dict[str, str]) -> TrackedRun:
        digest = hashlib.blake2b(json.dumps(identity).encode(), digest_size=6).hexdigest()
        return open_run(
            uri=uri,
            experiment=config.tracking.experiment,
            name=name,
            directory=f"{config.run.directory}#{digest}",
            parameters=parameters,
            tags=tags,
            data_sets={},
        )

    parent = start(config.name, identity, flatten(config), {})
    for column in columns:
        child = start(column.title, [*identity, column.title], column.parameters, {"mlflow.parentRunId": parent.run_id})
        finish_run(child, status="FINISHED", artifacts=None, metrics=column.metrics)
    note = (artifacts / "results.md").read_text(encoding="utf-8")
    finish_run(parent, status=status, artifacts=artifacts, metrics={}, note=note)
