"""Configures Ray Train's trainer for a run."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ray.train import FailureConfig, RunConfig, ScalingConfig, UserCallback
from ray.train.torch import TorchTrainer

from jobs.engine.cluster import CPU_ENVIRONMENT
from jobs.engine.config import TrainingConfig
from jobs.engine.elasticity import ElasticPolicy
from jobs.engine.failures import CheckpointRecord, RestartPolicy
from jobs.engine.job import WorkerJob
from jobs.engine.ray_private import forget_snapshot, loopback_rendezvous, set_policies
from jobs.engine.resumption import start_checkpoint
from jobs.engine.worker import pack_job, run_worker
from pipelines.storage import resolve


def run_trainer(trainer: TorchTrainer) -> dict[str, Any]:
    """Run the workers to their end and return the result of rank 0.

    Raises:
        KeyboardInterrupt: on Ctrl-C, which Ray Train handles itself by ending the workers and then raising SystemExit.
    """
    try:
        result: dict[str, Any] = trainer.fit().return_value  # type: ignore[attr-defined]  # Ray annotates Train V1
    except SystemExit as error:
        raise KeyboardInterrupt from error
    return result


def worker_environment(config: TrainingConfig) -> dict[str, str]:
    """Return the environment variables of a training worker."""
    # DeepSpeed compiles small extensions with ninja, which is installed beside the Python interpreter and may not be on
    # the PATH.
    environment = {"PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"}
    if not config.workers.use_gpu:
        environment |= {"DS_ACCELERATOR": "cpu", **CPU_ENVIRONMENT}
    if config.workers.compiles and "://" not in config.run.prepared_directory:
        environment["TORCHINDUCTOR_CACHE_DIR"] = f"{config.run.prepared_directory}/compiled"
    return environment


def make_trainer(
    config: TrainingConfig, job: WorkerJob, *, data_cpus: float, callbacks: Sequence[UserCallback] = ()
) -> TorchTrainer:
    """Create the trainer of a run: its workers and their environment, its storage, and its policies.

    Args:
        config: configuration of the run.
        job: what the workers do.
        data_cpus: logical CPUs that reading data takes in addition to the workers.
        callbacks: callbacks of Ray Train, beside those that every run has.
    """
    # Ray's annotations are those of Train V1; what is ignored below exists in Train V2, which is used at run time.
    workers = config.workers
    filesystem, path = resolve(config.run.resolved_storage)
    failure_config = FailureConfig(max_failures=config.run.max_restarts)
    scaling_config = ScalingConfig(
        num_workers=workers.max_workers,
        use_gpu=workers.use_gpu,
        placement_strategy=workers.placement.upper(),
        resources_per_worker={"CPU": workers.cpus_per_worker} | ({"GPU": 1} if workers.use_gpu else {}),
    )
    run = config.run
    forget_snapshot(run.directory)
    record = CheckpointRecord(run.directory, num_kept=run.num_checkpoints_kept)
    trainer = TorchTrainer(
        run_worker,  # type: ignore[arg-type]
        train_loop_config=pack_job(job, directory=run.directory, checkpoint=start_checkpoint(run)),
        torch_config=loopback_rendezvous(),
        scaling_config=scaling_config,
        run_config=RunConfig(  # type: ignore[call-arg]
            name=config.run.name,
            storage_path=path,
            storage_filesystem=filesystem,
            failure_config=failure_config,
            worker_runtime_env={"env_vars": worker_environment(config)},
            callbacks=[record, *callbacks],  # type: ignore[list-item]
        ),
    )
    is_elastic = workers.min_workers < workers.max_workers
    set_policies(
        trainer,
        failure_policy=RestartPolicy(
            failure_config, directory=run.directory, max_wait_minutes=run.max_wait_minutes, mailbox=job.mailbox
        ),
        scaling_policy=ElasticPolicy(
            scaling_config,
            possible=config.possible_num_workers,
            data_cpus=data_cpus,
            directory=run.directory,
            mailbox=job.mailbox,
        )
        if is_elastic
        else None,
    )
    return trainer
