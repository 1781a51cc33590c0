"""Publishing results as files and as runs in MLflow; those of an evaluation are a table with a column for every model."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pyarrow.fs

from jobs.engine.fields import flatten
from jobs.engine.masking import masked
from jobs.engine.metrics import TrackedRun, survive_outage
from jobs.engine.report import markdown_table
from jobs.engine.tracking import finish_run, open_run
from jobs.scoring.analyses.config import Analysis
from jobs.scoring.config import EvaluationConfig
from jobs.scoring.units import ModelSpec, ScoringFailedError, absolute_output, settings_digest, unit_key
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
        return cls(title=model.label, parameters={"model": model.path})


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    columns: Sequence[Column]
    table: str
    """The table as Markdown."""
    identity: str
    """Digest of everything that decides the figures."""


def figure_table(
    columns: Sequence[Column], title: Callable[[str], str], cell: Callable[[Mapping[str, float], str], str], corner: str
) -> str:
    """Returns a table with a row for every figure that has a title; figures of one data set are next to each other.

    `title` gets the name of a figure, and `cell` the figures of a column that has it, and its name.
    """
    names = list(dict.fromkeys(name for column in columns for name in column.metrics))
    data = list(dict.fromkeys(name.partition("/")[0] for name in names))
    names.sort(key=lambda name: data.index(name.partition("/")[0]))  # some figures appear only in a later column
    rows = [[corner, *(column.title for column in columns)]]
    for name in names:
        if shown := title(name):
            cells = (cell(column.metrics, name) if name in column.metrics else "–" for column in columns)
            rows.append([shown, *cells])
    return markdown_table(rows)


def percent_table(columns: Sequence[Column], titles: Mapping[str, str], *, hidden_if_zero: Sequence[str] = ()) -> str:
    """Returns a table of figures `<data>/<figure>`, or `<data>/<figure>@<k>`: per cent, but counts (`num_…`) as they are.

    `titles` maps figures to what their rows are called; `hidden_if_zero` have no row if it would be 0 in every column.
    """

    def title(name: str) -> str:
        data, _, figure = name.rpartition("/")
        figure, _, k = figure.partition("@")
        is_hidden = figure in hidden_if_zero and not any(column.metrics.get(name) for column in columns)
        return "" if is_hidden else f"{data} {titles[figure]}{k}".strip()

    def cell(metrics: Mapping[str, float], name: str) -> str:
        is_count = name.rpartition("/")[2].startswith("num_")
        return f"{metrics[name]:,.0f}" if is_count else f"{100 * metrics[name]:.2f}"

    return figure_table(columns, title, cell, "%")


def write_results(path: Path, values: Mapping[str, Any]) -> None:
    """Write results as JSON without secrets; it knows neither NaN nor infinity: they become null."""
    finite = masked(json.loads(json.dumps(values), parse_constant=lambda constant: None))
    path.write_text(json.dumps(finite, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def publish(
    config: Any,
    directory: str,
    write: Callable[[Path], None],
    *,
    uri: str,
    name: str,
    digest: str,
    metrics: Mapping[str, float],
    note: str,
    status: Literal["FINISHED", "FAILED"] = "FINISHED",
    data_sets: Mapping[str, tuple[str, str, str]] | None = None,
    children: Mapping[str, Column] | None = None,
) -> None:
    """Write the files of results into a directory, and log them to MLflow, whose failure is only a warning.

    `write` is called with a local directory, whose files replace those of the same names. Without a tracking URI nothing is
    logged. A run is that of the directory and of a digest of everything that decides the results; it has the files and the
    note, in Markdown. The children, by their digests, are runs below it.
    """

    def start(name: str, digest: str, parameters: Mapping[str, Any], **options: Any) -> TrackedRun:
        place, experiment = f"{directory}#{digest}", config.tracking.experiment
        return open_run(uri=uri, experiment=experiment, name=name, directory=place, parameters=parameters, **options)

    with tempfile.TemporaryDirectory(prefix="tempnet-results-") as local:
        write(Path(local))
        filesystem, path = resolve(directory)
        filesystem.create_dir(path, recursive=True)
        pyarrow.fs.copy_files(local, path, destination_filesystem=filesystem)
        if not uri:
            return
        with survive_outage(f"the results in {directory}"):
            parent = start(name, digest, flatten(config), tags={}, data_sets=data_sets or {})
            tags = {"mlflow.parentRunId": parent.run_id}
            for identity, column in (children or {}).items():
                child = start(column.title, identity, column.parameters, tags=tags, data_sets={})
                finish_run(child, status="FINISHED", artifacts=None, metrics=column.metrics)
            finish_run(parent, status=status, artifacts=local, metrics=metrics, note=note)


def publish_evaluation(
    config: EvaluationConfig,
    *,
    uri: str,
    columns: Sequence[Column],
    table: str,
    identity: Sequence[str],
    failed: Mapping[str, str],
) -> Results:
    """Publish `results.md` and `results.json` of an evaluation, with a run in MLflow for every column.

    `identity` are strings that together decide the figures, such as the keys of all units of work. If units failed
    (title → reason), a ScoringFailedError with the table is raised at the end.
    """
    results = {
        "configuration": dataclasses.asdict(config),
        "columns": [
            {
                **{name: value or None for name, value in column.parameters.items()},
                "title": column.title,
                "metrics": column.metrics,
            }
            for column in columns
        ],
        "failed": dict(failed),
    }
    digest = unit_key([*identity], 6)
    text = "\n".join([table, *(f"\nFAILED: {title}: {reason}" for title, reason in failed.items())]) + "\n"

    def write(local: Path) -> None:
        (local / "results.md").write_text(text, encoding="utf-8")
        write_results(local / "results.json", results)

    publish(
        config,
        config.run.directory,
        write,
        uri=uri,
        name=config.name,
        digest=digest,
        metrics={},
        note=text,
        status="FAILED" if failed else "FINISHED",
        children={unit_key([*identity, column.title], 6): column for column in columns},
    )
    if failed:
        raise ScoringFailedError(failed, table)
    return Results(columns=columns, table=table, identity=digest)


def publish_findings(
    config: Analysis,
    title: str,
    *,
    uri: str,
    values: Mapping[str, Any],
    table: str,
    conclusion: str,
    plot: Callable[[Path], None],
    plot_file: str,
    metrics: Mapping[str, float],
    settings: dict[str, Any],
    source: str,
) -> None:
    """Publish the figures, the table and the picture of an analysis, and print the table and the conclusion, one line.

    The settings are what the figures depend on, which identifies the run in MLflow, and the source is the path or URI of the
    data.
    """
    output, digest = absolute_output(config.output), settings_digest(settings)

    def write(local: Path) -> None:
        write_results(local / "results.json", {**values, "title": title, "settings": settings})
        (local / "results.md").write_text(table + "\n")
        plot(local / plot_file)

    data_sets = {"evaluation": ("data", digest, source)}
    publish(config, output, write, uri=uri, name=title, digest=digest, metrics=metrics, note=table, data_sets=data_sets)
    print(f"\n{table}\n\n{conclusion}\n{output}/results.json, results.md and {plot_file}")
