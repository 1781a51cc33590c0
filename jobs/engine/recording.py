"""What MLflow is told of a run that has ended: at once or, after an outage, when the same command is typed again."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import pyarrow.fs
from pipelines.storage import read_json, resolve, write_json

from jobs.engine import rivals
from jobs.engine.config import TrainingConfig
from jobs.engine.tracking import TrackedRun, finish_run, reconnection_uri, send_metrics, survive_outage


def keep_end(config: TrainingConfig, unsent_metrics: Sequence[Sequence[Any]], *, note: str) -> None:
    """Put what only this process knows beside the run, until all of it is in MLflow."""
    write_json(_file(config), {"unsent_metrics": list(unsent_metrics), "note": note})


class RecordModels(Protocol):
    """Makes a run's checkpoints, and the export of a run that has an outcome, models in MLflow."""

    def __call__(self, config: TrainingConfig, tracked: TrackedRun, outcome: Mapping[str, Any] | None) -> None:
        """Raises MLflow's errors; what is recorded already is left as it is."""
        ...


def record_end(config: TrainingConfig, outcome: Mapping[str, Any], record_models: RecordModels | None = None) -> None:
    """Send metrics that wait, the report, the models and the status FINISHED; nothing if that was done before.

    An outage is a warning, and what was to be sent stays where it is.

    Args:
        record_models: None: no model is recorded.
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
            found = {**outcome["validation"], **rivals.metrics(outcome)}
            finish_run(
                tracked,
                status="FINISHED",
                artifacts=local,
                metrics={f"final/{key}": value for key, value in found.items()},
                tags=rivals.tags(outcome),
                note=kept["note"],
            )
        if record_models is not None:
            record_models(config, tracked, outcome)
        filesystem, path = resolve(_file(config))
        filesystem.delete_file(path)


def _file(config: TrainingConfig) -> str:
    return f"{config.run.directory}/mlflow_end.json"
