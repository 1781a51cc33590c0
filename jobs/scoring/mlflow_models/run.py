"""The models of a training run in MLflow: its checkpoints and its export."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jobs.engine.config import TrainingConfig
from jobs.engine.tracking import TrackedRun


def record_models(config: TrainingConfig, tracked: TrackedRun, outcome: Mapping[str, Any] | None) -> None:
    """Make the checkpoints that a run has kept models in MLflow, and its export, if the run has an outcome.

    See `jobs.engine.recording.RecordModels`.
    """
    # Imported when training is over: it loads all that predicts.
    from jobs.scoring.mlflow_models.record import record_checkpoints, record_export

    record_checkpoints(tracked, config.run.directory)
    if outcome is not None:
        max_gib = config.tracking.max_model_gib
        record_export(tracked, config.run.export_directory, step=outcome["num_steps"], max_gib=max_gib)
