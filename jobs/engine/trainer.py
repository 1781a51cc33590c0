"""Ray Train's trainer as every run uses it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from pipelines.storage import resolve
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from jobs.engine.cleaner import ask_own_cluster
from jobs.engine.cluster import CPU_ENVIRONMENT
from jobs.engine.config import TrainingConfig
from jobs.engine.failures import RestartPolicy
from jobs.engine.job import WorkerJob
from jobs.engine.worker import packed, run_worker


class Trainer(TorchTrainer):
    """With a cleaner that asks its own cluster, and a policy of its own for failures (None: Ray Train's)."""

    failure_policy: RestartPolicy | None = None

    def _create_default_callbacks(self) -> list[Any]:
        # Of Train V2, which runs.
        return ask_own_cluster(super()._create_default_callbacks())  # type: ignore[misc]

    def _initialize_and_run_controller(self, **settings: Any) -> Any:
        if self.failure_policy is not None:
            settings["failure_policy"] = self.failure_policy
        return super()._initialize_and_run_controller(**settings)  # type: ignore[misc]


def make_trainer(config: TrainingConfig, job: WorkerJob) -> Trainer:
    """What :func:`jobs.engine.launch.train` starts: workers, their environment, storage, restarts."""
    # Ray's annotations are those of Train V1; the types that are ignored below exist in V2, which runs.
    workers = config.workers
    # DeepSpeed compiles small extensions with ninja, which lies beside the interpreter and need not be on the PATH.
    environment = {"PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"}
    if not workers.use_gpu:
        environment |= {"DS_ACCELERATOR": "cpu", **CPU_ENVIRONMENT}
    filesystem, path = resolve(f"{config.run.resolved_storage}")
    failure_config = FailureConfig(max_failures=config.run.max_restarts)
    trainer = Trainer(
        run_worker,  # type: ignore[arg-type]
        train_loop_config=packed(job),
        scaling_config=ScalingConfig(
            num_workers=workers.num_workers,
            use_gpu=workers.use_gpu,
            resources_per_worker={"CPU": workers.cpus_per_worker} | ({"GPU": 1} if workers.use_gpu else {}),
        ),
        run_config=RunConfig(  # type: ignore[call-arg]
            name=config.run.name,
            storage_path=path,
            storage_filesystem=filesystem,
            failure_config=failure_config,
            checkpoint_config=CheckpointConfig(num_to_keep=config.run.num_checkpoints_kept),
            worker_runtime_env={"env_vars": environment},
        ),
    )
    trainer.failure_policy = RestartPolicy(
        failure_config,
        directory=config.run.directory,
        max_wait_minutes=config.run.max_wait_minutes,
        mailbox=job.mailbox,
    )
    return trainer
