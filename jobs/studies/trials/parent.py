"""What holds trials together: their parent run in MLflow, and what is published of all of them."""

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
    """The MLflow run that the trials are shown under, found again when they are continued; None where `uri` is empty.

    Args:
        config: the dataclass that everything follows from.
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
    failed: Mapping[str, str],
) -> Results[Row]:
    """Write `results.md`, `results.json` and other files into the run's directory and, with the metrics, to the parent run,
    which ends; returns what a person is shown.

    Args:
        table: in markdown; what MLflow shows above all else.
        content: of `results.json`, which says beside it what failed.
        files: name → content, of the others.
        failed: name of a trial → its error.
    """
    contents: dict[str, str | bytes] = {
        "results.md": table + "\n",
        "results.json": json.dumps(_finite(masked({**content, "failed": dict(failed)})), indent=1, ensure_ascii=False),
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
                finish_run(parent, status=status, artifacts=local, metrics=metrics, note=table)
    return Results(
        rows=rows, table=table, failed=failed, directory=run.directory, tracking_uri=parent.uri if parent else ""
    )


def _finite(value: Any) -> Any:
    """JSON knows no NaN and no infinity."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
