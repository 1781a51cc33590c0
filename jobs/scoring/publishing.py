"""Publishing a table of results with the models side by side: as Markdown, as JSON beside it, and in MLflow."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobs.engine.config import RunSection, TrackingSection
from jobs.engine.identity import flatten
from jobs.engine.masking import masked
from jobs.engine.tracking import TrackedRun, finish_run, open_run, resolved_uri, survive_outage
from pipelines.storage import resolve


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedColumn:
    """One column of the table, which is also one MLflow run."""

    title: str
    parameters: Mapping[str, Any]
    metrics: Mapping[str, float]


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """Returns a Markdown table whose columns are also aligned in the source text.

    The first row is the heading. The first column is aligned to the left, and all others hold figures, aligned to the
    right.
    """
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        figures = [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)]
        return f"| {' | '.join([cells[0].ljust(widths[0]), *figures])} |"

    ruler = [":" + "-" * (widths[0] - 1), *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join(map(line, [rows[0], ruler, *rows[1:]]))


def publish(
    config: Any,
    *,
    run: RunSection,
    tracking: TrackingSection,
    table: str,
    columns: Sequence[PublishedColumn],
    identity: Sequence[str],
    failed: Mapping[str, str] | None = None,
) -> None:
    """Write `results.md` and `results.json` into the run's directory, and log them to MLflow.

    MLflow gets a parent run for the whole evaluation and a child run for every column. Publishing the same evaluation
    again updates the same MLflow runs.

    Args:
        config: the dataclass that configures the evaluation; it is stored with the results.
        identity: strings that together decide the figures, such as the keys of all units of work. MLflow runs are
            recognised by their hash.
        failed: title → reason for every part that failed and is therefore missing from the table.
    """
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
        "failed": dict(failed or {}),
    }
    table = "\n".join([table, *(f"\nFAILED: {title}: {reason}" for title, reason in (failed or {}).items())])
    with tempfile.TemporaryDirectory() as name:
        local = Path(name)
        (local / "results.md").write_text(table + "\n", encoding="utf-8")
        (local / "results.json").write_text(json.dumps(masked(results), indent=1, ensure_ascii=False), encoding="utf-8")
        filesystem, path = resolve(run.directory)
        for file in local.iterdir():
            with filesystem.open_output_stream(f"{path}/{file.name}") as stream:
                stream.write(file.read_bytes())
        with survive_outage("the evaluation"):
            if uri := resolved_uri(tracking, run.resolved_storage):
                _track(
                    config, run, tracking.experiment, uri, columns, identity, local, "FAILED" if failed else "FINISHED"
                )


def _track(
    config: Any,
    run: RunSection,
    experiment: str,
    uri: str,
    columns: Sequence[PublishedColumn],
    identity: Sequence[str],
    artifacts: Path,
    status: str,
) -> None:
    def opened(name: str, identity: Sequence[str], parameters: Mapping[str, Any], tags: dict[str, str]) -> TrackedRun:
        digest = hashlib.blake2b(json.dumps(identity).encode(), digest_size=6).hexdigest()
        return open_run(
            uri=uri,
            experiment=experiment,
            name=name,
            directory=f"{run.directory}#{digest}",
            parameters=parameters,
            tags=tags,
            data_sets={},
        )

    parent = opened(run.name, identity, flatten(config), {})
    for column in columns:
        child = opened(
            column.title, [*identity, column.title], column.parameters, {"mlflow.parentRunId": parent.run_id}
        )
        # MLflow does not allow @ in the names of metrics.
        metrics = {name.replace("@", "_at_"): value for name, value in column.metrics.items()}
        finish_run(child, status="FINISHED", artifacts=None, metrics=metrics)
    note = (artifacts / "results.md").read_text(encoding="utf-8")
    finish_run(parent, status=status, artifacts=artifacts, metrics={}, note=note)
