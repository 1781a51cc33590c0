"""What holds trials together: their parent run in MLflow, and what is published of all of them."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jobs.training.config import RunSection, TrackingSection
from jobs.training.identity import flatten
from jobs.training.tracking import TrackedRun, finish_run, open_run, run_tags, survive_outage
from pipelines.archives import resolve


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
    files: Mapping[str, str],
    metrics: Mapping[str, float],
    has_failed: bool,
) -> None:
    """Write files into the run's directory and, with the metrics, to the parent run, which ends.

    Args:
        files: name → content; `results.md` is also what MLflow shows above all else.
        has_failed: whether a trial has.
    """
    with tempfile.TemporaryDirectory() as name:
        local = Path(name)
        filesystem, path = resolve(run.directory)
        for file, content in files.items():
            (local / file).write_text(content, encoding="utf-8")
            with filesystem.open_output_stream(f"{path}/{file}") as stream:
                stream.write(content.encode())
        if parent is not None:
            with survive_outage("the results"):
                status = "FAILED" if has_failed else "FINISHED"
                finish_run(parent, status=status, artifacts=local, metrics=metrics, note=files["results.md"])
