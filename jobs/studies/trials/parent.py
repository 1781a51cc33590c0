"""What a group of trials has in common: a parent run in MLflow, and published results."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from jobs.engine.config import RunSection, TrackingSection
from jobs.engine.identity import flatten
from jobs.engine.masking import masked
from jobs.engine.tracking import TrackedRun, finish_run, open_run, run_tags, survive_outage
from jobs.studies.trials.command import Results
from pipelines.storage import resolve

Row = TypeVar("Row")


def open_parent(
    config: Any,
    *,
    run: RunSection,
    tracking: TrackingSection,
    uri: str,
    num_trials: int,
    data_sets: Mapping[str, tuple[str, str, str]],
) -> TrackedRun | None:
    """Open the MLflow parent run of the trials, or find it again if they are continued; returns None if `uri` is empty.

    Args:
        config: the dataclass that configures the job; its fields become parameters of the run.
        run: name and directory of the job.
        tracking: the tracking settings.
        uri: URI of the MLflow store.
        num_trials: number of trials, logged as a parameter.
        data_sets: context → (name, digest, source URI).
    """
    if not uri:
        return None
    return open_run(
        uri=uri,
        experiment=tracking.experiment,
        name=run.name,
        directory=run.directory,
        parameters={**flatten(config), "num_trials": num_trials},
        tags=run_tags(config, tracking),
        data_sets=data_sets,
    )


def publish(
    run: RunSection,
    parent: TrackedRun | None,
    *,
    rows: Sequence[Row],
    table: str,
    content: Mapping[str, Any],
    files: Mapping[str, str | bytes] | None = None,
    metrics: Mapping[str, float],
    tags: Mapping[str, str] | None = None,
    failed: Mapping[str, str],
) -> Results[Row]:
    """Publish results in the run's directory and in MLflow, and return what to show to the user.

    Writes `results.md`, `results.json` and other files into the run's directory. They and the metrics are also logged
    to the parent run, which is then finished.

    Args:
        run: name and directory of the job.
        parent: the MLflow parent run; None: nothing is tracked.
        rows: the rows of results, which are returned to the caller.
        table: the table in Markdown, which MLflow shows as the run's description.
        content: content of `results.json`, to which the failed trials are added.
        files: name → content of further files.
        metrics: metrics of the parent run.
        tags: tags of the parent run.
        failed: name of a failed trial → its error.
    """
    contents: dict[str, str | bytes] = {
        "results.md": table + "\n",
        "results.json": json.dumps(
            _finite_or_none(masked({**content, "failed": dict(failed)})), indent=1, ensure_ascii=False
        ),
        **(files or {}),
    }
    with tempfile.TemporaryDirectory() as name:
        local = Path(name)
        filesystem, path = resolve(run.directory)
        for file, written in contents.items():
            written = written.encode() if isinstance(written, str) else written
            (local / file).write_bytes(written)
            with filesystem.open_output_stream(f"{path}/{file}") as stream:
                stream.write(written)
        if parent is not None:
            with survive_outage("the results"):
                status = "FAILED" if failed else "FINISHED"
                finish_run(parent, status=status, artifacts=local, metrics=metrics, tags=tags, note=table)
    return Results(
        rows=rows,
        table=table,
        failed=failed,
        directory=run.directory,
        tracking_uri=parent.uri if parent else "",
        experiment_id=parent.experiment_id if parent else "",
    )


def _finite_or_none(value: Any) -> Any:
    """Returns the value with NaN and infinity replaced by None, since JSON has neither."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite_or_none(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite_or_none(item) for item in value]
    return value
