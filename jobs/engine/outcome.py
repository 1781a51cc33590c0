"""Writes what a run leaves at its end: its outcome, its report, and what remains to be sent to MLflow."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

from jobs.engine.fields import resolve_fields
from jobs.engine.masking import masked
from jobs.engine.recording import keep_end
from jobs.engine.rivals import verdict
from jobs.engine.task import Plan, PreparedTask
from jobs.engine.tracking import TrackedRun
from pipelines.retries import RETRIES
from pipelines.storage import resolve, write_json


def finish(plan: Plan, prepared: PreparedTask, tracked: TrackedRun | None, result: dict[str, Any]) -> dict[str, Any]:
    """Write the outcome, the report, and what remains to be sent to MLflow; return the outcome."""
    config = plan.config
    unsent = result.pop("unsent_metrics", [])
    data = {"num_samples": prepared.num_samples, **prepared.read_data_outcome()}
    num_samples = data.pop("num_samples")
    outcome = {
        **result,
        "run": config.run.name,
        "directory": config.run.directory,
        "started_at_step": config.run.start_step,
        "export": config.run.export_directory,
        "mlflow_run_id": tracked.run_id if tracked else None,
        "mlflow_experiment_id": tracked.experiment_id if tracked else None,
        "tracking_uri": masked(plan.tracking_uri),
        **prepared.outcome,
        **data,
        "store_retries": result.get("store_retries", 0) + RETRIES.take(),  # This process has prepared the data.
        "num_epochs": result["num_steps"] * config.optimizer.batch_size / num_samples if num_samples else None,
        "temperature_verdict": verdict(result),
    }
    _publish(plan, outcome, tracked)
    if tracked:
        keep_end(config, unsent, note=f"```\n{plan.summary_table(outcome)}\n```")
    write_json(f"{config.run.directory}/outcome.json", outcome)
    return outcome


def _publish(plan: Plan, outcome: dict[str, Any], tracked: TrackedRun | None) -> None:
    """Write the report into the run's directory."""
    config = plan.config
    with tempfile.TemporaryDirectory() as name:
        local = Path(name)
        (local / "summary.txt").write_text(plan.summary_table(outcome) + "\n")
        (local / "outcome.json").write_text(json.dumps(outcome, indent=1))
        values = masked(dataclasses.asdict(resolve_fields(config)))
        (local / "configuration.json").write_text(json.dumps(values, indent=1))
        plan.write_report(local, outcome, tracked)
        filesystem, path = resolve(f"{config.run.directory}/report")
        filesystem.create_dir(path, recursive=True)
        for file in local.iterdir():
            with filesystem.open_output_stream(f"{path}/{file.name}") as stream:
                stream.write(file.read_bytes())
