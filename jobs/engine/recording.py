"""Writes what a run leaves at its end, and sends it to MLflow: at once or, after an outage, at the next start."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import pyarrow.fs
import torch

from jobs.engine import baselines
from jobs.engine.baselines import verdict
from jobs.engine.config import TrainingConfig
from jobs.engine.fields import resolve_fields
from jobs.engine.masking import masked
from jobs.engine.metrics import TrackedRun, send_metrics, survive_outage
from jobs.engine.task import Plan, PreparedTask
from jobs.engine.tracking import finish_run, reconnection_uri
from pipelines.storage import exists, read_json, resolve, write_bytes, write_json
from pipelines.store_errors import RETRIES
from tempnet.network import CONFIG_FILE, HUB_NAME, PAIRED_DIRECTORY, TempNet, model_card
from tempnet.network_config import TempNetConfig


def keep_end(config: TrainingConfig, unsent_metrics: Sequence[Sequence[Any]], *, note: str) -> None:
    """Store what MLflow must still receive in the run's directory, until :func:`record_end` has sent it."""
    write_json(_file(config), {"unsent_metrics": list(unsent_metrics), "note": note})


class RecordModels(Protocol):
    """Registers a run's checkpoints as models in MLflow, and also its export if the run has an outcome."""

    def __call__(self, config: TrainingConfig, tracked: TrackedRun, outcome: Mapping[str, Any] | None) -> None:
        """Register the models; raises MLflow's errors, and leaves models that are already registered unchanged."""
        ...


def record_end(config: TrainingConfig, outcome: Mapping[str, Any], record_models: RecordModels | None = None) -> None:
    """Send the unsent metrics, the report, the models and the status FINISHED to MLflow, unless this was done before.

    An outage of MLflow only causes a warning, and what was to be sent is kept for the next call.
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
            final = {f"verdict/{key}": value for key, value in baselines.metrics(outcome).items()}
            if num_retries := outcome.get("store_retries"):
                final["store_retries"] = num_retries
            finish_run(
                tracked,
                status="FINISHED",
                artifacts=local,
                metrics=final,
                tags=baselines.tags(outcome) | {"batches_digest": outcome.get("batches_digest", "")},
                note=kept["note"],
            )
        if record_models is not None:
            record_models(config, tracked, outcome)
        filesystem, path = resolve(_file(config))
        filesystem.delete_file(path)


def _file(config: TrainingConfig) -> str:
    return f"{config.run.directory}/mlflow_end.json"


def finish(plan: Plan, prepared: PreparedTask, tracked: TrackedRun | None, result: dict[str, Any]) -> dict[str, Any]:
    """Write the outcome, the report, and what remains to be sent to MLflow; return the outcome."""
    config = plan.config
    unsent = result.pop("unsent_metrics", {}).get(config.run.name, [])
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
    write_card(config, prepared, outcome)
    write_json(f"{config.run.directory}/outcome.json", outcome)
    return outcome


def write_card(config: TrainingConfig, prepared: PreparedTask, outcome: Mapping[str, Any]) -> None:
    """Write the model card of an export with TempNets beside it."""
    export = config.run.export_directory
    with torch.device("meta"):  # The card needs the numbers of their parameters only.
        networks = {
            name: TempNet(TempNetConfig(**values))
            for kind in ("", "_image", "_text")
            if (values := read_json(f"{export}/{(name := f'{PAIRED_DIRECTORY}{kind}')}/{CONFIG_FILE}"))
        }
    if not networks:
        return
    base = getattr(getattr(config, "model", None), "path", "")
    facts = [("base model", base)] if base else []
    facts += [(f"{name} data", uri) for name, (_, _, uri) in prepared.data_sets.items()]
    facts += [("training loss", outcome["loss"]), *baselines.rows(outcome)]
    of_hub = base if HUB_NAME.fullmatch(base) and not exists(base) else ""
    card = model_card(networks, "/".join(export.split("/")[-3:]), of_hub, masked(facts))
    write_bytes(f"{export}/README.md", card.encode())


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
