"""MLflow's models of training runs: their checkpoints, and their export, which predicts temperatures of texts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jobs.engine.config import TrainingConfig
from jobs.engine.metrics import TrackedRun


def record_models(config: TrainingConfig, tracked: TrackedRun, outcome: Mapping[str, Any] | None) -> None:
    """Record the checkpoints that a run has kept as MLflow models, and also its export if the run has an outcome."""
    # Imported only after training, because it imports all the prediction code.
    from jobs.scoring.mlflow_models.record import record_checkpoints, record_export

    record_checkpoints(tracked, config.run.directory)
    if outcome is not None:
        max_gib = config.tracking.max_model_gib
        record_export(tracked, config.run.export_directory, step=outcome["num_steps"], max_gib=max_gib)
