"""Sends the end of a run to MLflow: immediately or, after an outage, when the same command is run again."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import pyarrow.fs

from jobs.engine import rivals
from jobs.engine.config import TrainingConfig
from jobs.engine.metrics import send_metrics
from jobs.engine.tracking import TrackedRun, finish_run, reconnection_uri, survive_outage
from pipelines.storage import read_json, resolve, write_json


def keep_end(config: TrainingConfig, unsent_metrics: Sequence[Sequence[Any]], *, note: str) -> None:
    """Store what MLflow must still receive in the run's directory, until :func:`record_end` has sent it.

    Args:
        config: configuration of the run.
        unsent_metrics: metrics that could not be sent so far (`MetricLogger.unsent`).
        note: Markdown text that describes the run in MLflow.
    """
    write_json(_file(config), {"unsent_metrics": list(unsent_metrics), "note": note})


class RecordModels(Protocol):
    """Registers a run's checkpoints as models in MLflow, and also its export if the run has an outcome."""

    def __call__(self, config: TrainingConfig, tracked: TrackedRun, outcome: Mapping[str, Any] | None) -> None:
        """Register the models; raises MLflow's errors, and leaves models that are already registered unchanged."""
        ...


def record_end(config: TrainingConfig, outcome: Mapping[str, Any], record_models: RecordModels | None = None) -> None:
    """Send the unsent metrics, the report, the models and the status FINISHED to MLflow, unless this was done before.

    An outage of MLflow only causes a warning, and what was to be sent is kept for the next call.

    Args:
        config: configuration of the run.
        outcome: outcome of the run.
        record_models: registers the models; None: no models are registered.
    """
    kept = read_json(_file(config))
    if kept is None:
        return
    tracked = TrackedRun(
        uri=reconnection_uri(outcome["tracking_uri"], config.tracking), run_id=outcome["mlflow_run_id"]
    )
    with survive_outage(f"the end of {config.run.name} (the same command sends it later)"):
        send_metrics(tracked, kept["unsent_metrics"])
        filesystem, path = resolve(f"{config.run.directory}/report")
        with tempfile.TemporaryDirectory() as local:
            pyarrow.fs.copy_files(path, local, source_filesystem=filesystem)
            final = {f"verdict/{key}": value for key, value in rivals.metrics(outcome).items()}
            if num_retries := outcome.get("store_retries"):
                final["store_retries"] = num_retries
            finish_run(
                tracked,
                status="FINISHED",
                artifacts=local,
                metrics=final,
                tags=rivals.tags(outcome),
                note=kept["note"],
            )
        if record_models is not None:
            record_models(config, tracked, outcome)
        filesystem, path = resolve(_file(config))
        filesystem.delete_file(path)


def _file(config: TrainingConfig) -> str:
    return f"{config.run.directory}/mlflow_end.json"
