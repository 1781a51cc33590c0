"""From a configuration to a finished run: checks, Ray, data, MLflow, Ray Train, report.

Everything that can be refused is refused before Ray starts.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from ray.train.v2.api.exceptions import TrainingFailedError
from transformers import AutoModelForCausalLM

from jobs.calibration import calibrated, describe_calibration
from jobs.cluster import CPU_ENVIRONMENT, check_resources, start_ray
from jobs.console import Console
from jobs.training.config import LanguageModelConfig, with_absolute_paths, with_rho
from jobs.training.hardware import state_bytes_per_worker
from jobs.training.identity import configuration_hash, differences, fixed_values, flatten
from jobs.training.job import FatalTrainingError, WorkerJob
from jobs.training.models import base_config, resolved_rho
from jobs.training.report import summary_table, write_report
from jobs.training.tracking import TrackedRun, default_uri, finish_run, open_run, survive_outage
from pipelines.archives import list_archives, resolve
from pipelines.manifest import Manifest, read_json, write_json
from pipelines.prepare import PrepareConfig, describe, prepare_text
from pipelines.stream import READ_CPUS
from pipelines.tokenization import load_tokenizer
from tempnet.dro import check_rho
from tempnet.network import TempNet


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a configuration comes to, known before anything starts."""

    config: LanguageModelConfig
    vocab_size: int
    """The effective vocabulary: the tokenizer's."""
    rho: float | None
    """None until it is calibrated."""
    num_base_parameters: int
    num_tempnet_parameters: int
    tracking_uri: str
    """Empty: nothing is tracked."""

    def describe(self) -> str:
        """The plan, for a person."""
        config = self.config
        tokens = config.optimizer.batch_size * config.data.context_length
        return "\n".join(
            [
                f"run          {config.run.name} in {config.run.directory} (configuration {configuration_hash(config)})",
                f"loss         {config.temperature.loss}, {self._describe_rho()}, "
                f"τ in [{config.temperature.tau_min:g}, {config.temperature.tau_max:g}]",
                f"batch        {config.optimizer.batch_size} blocks × {config.data.context_length} = {tokens} tokens: "
                f"{config.workers.num_workers} workers × {config.num_accumulation_steps} micro-batches × "
                f"{config.micro_batch_size} blocks",
                f"steps        {config.run.num_steps} = {config.run.num_steps * tokens:,} tokens; checkpoint every "
                f"{config.run.checkpoint_every}, validation every {config.validation.every}",
                f"workers      {config.workers.num_workers} × {'1 GPU' if config.workers.use_gpu else 'CPU'}, "
                f"ZeRO {config.workers.zero_stage}, {config.workers.precision}",
                f"parameters   base {self.num_base_parameters:,}{' (frozen)' if config.model.is_frozen else ''}, "
                f"TempNet {self.num_tempnet_parameters:,}",
                f"memory       {self.state_gib_per_worker:.2f} GiB a worker for weights, gradients and optimizer",
                f"MLflow       {self.tracking_uri or 'off'}",
            ]
        )

    def _describe_rho(self) -> str:
        settings = self.config.temperature
        if self.rho is None:
            return (
                f"ρ to be calibrated for a mean τ* of {settings.calibrated_tau:g} on "
                f"{settings.num_calibration_tokens:,} tokens of the training data"
            )
        entropy = math.log(self.vocab_size) - self.rho
        return (
            f"ρ = {self.rho:.4f}: target entropy {entropy:.4f} of "
            f"log {self.vocab_size} = {math.log(self.vocab_size):.4f} nats"
        )

    @property
    def state_gib_per_worker(self) -> float:
        """Memory of a worker before activations."""
        frozen = self.num_base_parameters if self.config.model.is_frozen else 0
        trained = self.num_base_parameters + self.num_tempnet_parameters - frozen
        return state_bytes_per_worker(trained, frozen, self.config) / 2**30


def make_plan(config: LanguageModelConfig) -> Plan:
    """Check everything that can be checked without Ray.

    Raises:
        ValueError, FileNotFoundError, OSError: naming the field, the value and what would be legal.
    """
    storage = config.run.resolved_storage
    for field in ("train", "validation"):
        try:
            list_archives(getattr(config.data, field))
        except (ValueError, FileNotFoundError) as error:
            raise type(error)(f"data.{field}: {error}") from error
    tokenizer = load_tokenizer(config.tokenizer)
    vocab_size = len(tokenizer)
    with torch.device("meta"):  # shapes only
        base = AutoModelForCausalLM.from_config(base_config(config, tokenizer))
    rho = resolved_rho(config, vocab_size)
    try:
        check_rho(rho or 0.0, vocab_size)
    except ValueError as error:
        raise ValueError(f"temperature.rho: {error}") from error
    num_tempnet_parameters = 0
    if config.temperature.needs_tempnet:
        network = TempNet(config.temperature.network_config(vocab_size, rho or 0.0))
        num_tempnet_parameters = sum(parameter.numel() for parameter in network.parameters())
    return Plan(
        config=config,
        vocab_size=vocab_size,
        rho=rho,
        num_base_parameters=sum(parameter.numel() for parameter in base.parameters()),
        num_tempnet_parameters=num_tempnet_parameters,
        tracking_uri=(config.tracking.uri or default_uri(storage)) if config.tracking.enabled else "",
    )


def train(config: LanguageModelConfig) -> dict[str, Any]:
    """Run a configuration to its end, or continue it; returns the outcome, which is also `<run>/outcome.json`.

    Raises:
        ValueError and the like: before anything starts, see :func:`make_plan`; also for a taken run name.
        FatalTrainingError: a loss that is not finite; the message names the step and the blocks of its batch.
        TrainingFailedError: a worker group failed more often than `run.max_restarts`.
    """
    plan = make_plan(config)
    outcome = claim_directory(config)
    print(plan.describe(), flush=True)
    if outcome is not None:
        print(f"\nThis run is finished; its results:\n\n{summary_table(outcome)}\n")
        return outcome

    start_ray()
    check_resources(
        num_workers=config.workers.num_workers,
        cpus_per_worker=config.workers.cpus_per_worker,
        use_gpu=config.workers.use_gpu,
        data_cpus=READ_CPUS * config.workers.num_workers,
    )
    prepared = with_absolute_paths(config)
    train_data = _prepare(prepared, "train")
    validation_data = _prepare(prepared, "validation")
    if plan.rho is None:
        calibration = calibrated(prepared, train_data)
        plan = dataclasses.replace(plan, rho=calibration["rho"])
        print(f"{'ρ':<12} {describe_calibration(calibration)}", flush=True)
    assert plan.rho is not None
    prepared = with_rho(prepared, plan.rho)
    tracked = _open_run(plan, train_data, validation_data) if plan.tracking_uri else None
    try:
        with Console(config.run.num_steps) as console:
            job = WorkerJob(
                config=prepared,
                train_directory=train_data.directory,
                validation_directory=validation_data.directory,
                tracked_run=tracked,
                mailbox=console.mailbox,
                with_bar=sys.stderr.isatty(),
            )
            result = _trainer(config, job).fit().return_value  # type: ignore[attr-defined]
        if "fatal" in result:
            raise FatalTrainingError(result["fatal"])
    except (FatalTrainingError, TrainingFailedError):
        if tracked:
            with survive_outage("the failure"):
                finish_run(tracked, status="FAILED", artifacts=None, metrics={}, tags={})
        raise
    outcome = result | {
        "run": config.run.name,
        "directory": config.run.directory,
        "export": config.run.export_directory,
        "rho": plan.rho,
        "target_entropy": math.log(plan.vocab_size) - plan.rho,
        "tau_min": config.temperature.tau_min,
        "tau_max": config.temperature.tau_max,
        "loss": config.temperature.loss,
        "num_documents_lost": {"train": dict(train_data.problems), "validation": dict(validation_data.problems)},
        "num_blocks_train": train_data.num_blocks,
        "num_epochs": config.run.num_steps * config.optimizer.batch_size / train_data.num_blocks,
        "mlflow_run_id": tracked.run_id if tracked else None,
        "tracking_uri": plan.tracking_uri,
    }
    _publish(config, outcome, tracked)
    write_json(f"{config.run.directory}/outcome.json", outcome)
    return outcome


def claim_directory(config: LanguageModelConfig) -> dict[str, Any] | None:
    """Take the run's directory, or find it taken by this same configuration; returns the outcome of a finished run.

    Raises:
        ValueError: if another configuration holds the name; the differing fields are shown.
    """
    record = f"{config.run.directory}/configuration.json"
    held = read_json(record)
    wanted = json.loads(json.dumps(fixed_values(config)))
    if held is None:
        filesystem, path = resolve(config.run.directory)
        filesystem.create_dir(path, recursive=True)
        write_json(record, wanted)
        return None
    if changed := differences(held, wanted):
        raise ValueError(
            f"run.name = {config.run.name!r} is taken in {config.run.resolved_storage} by another configuration: "
            f"{'; '.join(changed)}. Choose another run.name, or delete {config.run.directory}"
        )
    return read_json(f"{config.run.directory}/outcome.json")


def _prepare(config: LanguageModelConfig, split: str) -> Manifest:
    started = time.monotonic()
    manifest = prepare_text(
        PrepareConfig(
            source=getattr(config.data, split),
            tokenizer=config.tokenizer,
            context_length=config.data.context_length,
            text_field=config.data.text_field,
            max_bad_share=config.data.max_bad_share,
        ),
        f"{config.run.resolved_storage}/prepared",
    )
    print(f"{split:<12} {describe(manifest, time.monotonic() - started)}", flush=True)
    return manifest


def _open_run(plan: Plan, train_data: Manifest, validation_data: Manifest) -> TrackedRun:
    config = plan.config
    return open_run(
        uri=plan.tracking_uri,
        experiment=config.tracking.experiment,
        name=config.run.name,
        directory=config.run.directory,
        parameters=flatten(config)
        | {
            "vocab_size": plan.vocab_size,
            "resolved.rho": plan.rho,
            "resolved.target_entropy": math.log(plan.vocab_size) - (plan.rho or 0.0),
        },
        tags={"configuration_hash": configuration_hash(config), "ray_job_id": os.environ.get("RAY_JOB_ID", "")},
        data_sets={
            "training": (config.data.train.rstrip("/").rsplit("/", 1)[-1], train_data.digest, config.data.train),
            "validation": (
                config.data.validation.rstrip("/").rsplit("/", 1)[-1],
                validation_data.digest,
                config.data.validation,
            ),
        },
    )


def _trainer(config: LanguageModelConfig, job: WorkerJob) -> TorchTrainer:
    # Ray's annotations are those of Train V1; the types that are ignored below exist in V2, which runs.
    workers = config.workers
    # DeepSpeed compiles small extensions with ninja, which lies beside the interpreter and need not be on the PATH.
    environment = {"PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"}
    if not workers.use_gpu:
        environment |= {"DS_ACCELERATOR": "cpu", **CPU_ENVIRONMENT}
    filesystem, path = resolve(f"{config.run.resolved_storage}")
    return TorchTrainer(
        _train_worker,  # type: ignore[arg-type]
        train_loop_config={"job": job},
        scaling_config=ScalingConfig(
            num_workers=workers.num_workers,
            use_gpu=workers.use_gpu,
            resources_per_worker={"CPU": workers.cpus_per_worker} | ({"GPU": 1} if workers.use_gpu else {}),
        ),
        run_config=RunConfig(  # type: ignore[call-arg]
            name=config.run.name,
            storage_path=path,
            storage_filesystem=filesystem,
            failure_config=FailureConfig(max_failures=config.run.max_restarts),
            checkpoint_config=CheckpointConfig(num_to_keep=config.run.num_checkpoints_kept),
            worker_runtime_env={"env_vars": environment},
        ),
    )


def _train_worker(settings: dict[str, Any]) -> dict[str, Any]:
    # Imported in the worker: it loads DeepSpeed, which the driver has no use for.
    from jobs.training.loop import train_worker

    return train_worker(settings["job"])


def _publish(config: LanguageModelConfig, outcome: dict[str, Any], tracked: TrackedRun | None) -> None:
    """Write the report beside the run, and into MLflow."""
    tokenizer = load_tokenizer(config.tokenizer)
    with tempfile.TemporaryDirectory() as name:
        local = Path(name)
        write_report(local, outcome, tokenizer, tracked)
        (local / "configuration.json").write_text(json.dumps(dataclasses.asdict(config), indent=1))
        filesystem, path = resolve(f"{config.run.directory}/report")
        filesystem.create_dir(path, recursive=True)
        for file in local.iterdir():
            with filesystem.open_output_stream(f"{path}/{file.name}") as stream:
                stream.write(file.read_bytes())
        if tracked:
            final = {f"final/{key}": value for key, value in outcome["validation"].items()}
            with survive_outage("the report"):
                finish_run(tracked, status="FINISHED", artifacts=local, metrics=final, tags={})
