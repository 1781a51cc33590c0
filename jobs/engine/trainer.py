"""Configures Ray Train's trainer for a run."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from jobs.engine.cleaner import ask_own_cluster
from jobs.engine.cluster import CPU_ENVIRONMENT
from jobs.engine.config import TrainingConfig
from jobs.engine.controller_start import NUM_STARTS, SilentControllerError, wait_for_answer
from jobs.engine.elasticity import ElasticPolicy
from jobs.engine.failures import RestartPolicy
from jobs.engine.job import WorkerJob
from jobs.engine.rendezvous import Rendezvous
from jobs.engine.start import start_checkpoint
from jobs.engine.worker import pack_job, run_worker
from pipelines.storage import resolve


class Trainer(TorchTrainer):
    """Ray Train's trainer with its own failure policy, a cleaner that asks its own cluster, and a controller that answers.

    The controller is started again if it does not answer (`jobs.engine.controller_start`).
    """

    failure_policy: RestartPolicy | None = None
    """Decides whether failed workers are restarted; None: Ray Train's policy."""
    scaling_policy: ElasticPolicy | None = None
    """Decides how many workers there are; None: their number does not change."""

    def fit(self) -> Any:
        """Run the workers to their end and return Ray Train's result.

        Raises:
            KeyboardInterrupt: on Ctrl-C, which Ray Train handles itself by ending the workers and then raising SystemExit.
        """
        try:
            return super().fit()
        except SystemExit as error:
            raise KeyboardInterrupt from error

    def _create_default_callbacks(self) -> list[Any]:
        # The method exists in Train V2, which is used at run time, but not in the annotated class of Train V1.
        return ask_own_cluster(super()._create_default_callbacks())  # type: ignore[misc]

    def _initialize_and_run_controller(self, **settings: Any) -> Any:
        if self.failure_policy is not None:
            settings["failure_policy"] = self.failure_policy
        if self.scaling_policy is not None:
            settings["scaling_policy"] = self.scaling_policy
        for _ in range(NUM_STARTS - 1):
            try:
                return super()._initialize_and_run_controller(**settings)  # type: ignore[misc]
            except SilentControllerError as error:
                print(f"{error}; starting another one", flush=True)
        return super()._initialize_and_run_controller(**settings)  # type: ignore[misc]

    def _register_sigint_handler(self, controller: Any) -> None:
        # Ray Train calls this between the controller's start and the call that runs it, in the main thread.
        wait_for_answer(controller)
        super()._register_sigint_handler(controller)  # type: ignore[misc]


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


def make_trainer(config: TrainingConfig, job: WorkerJob, *, data_cpus: float) -> Trainer:
    """Create the trainer of a run: its workers and their environment, its storage, and its policies.

    Args:
        config: configuration of the run.
        job: what the workers do.
        data_cpus: logical CPUs that reading data takes in addition to the workers.
    """
    # Ray's annotations are those of Train V1; what is ignored below exists in Train V2, which is used at run time.
    workers = config.workers
    filesystem, path = resolve(f"{config.run.resolved_storage}")
    failure_config = FailureConfig(max_failures=config.run.max_restarts)
    scaling_config = ScalingConfig(
        num_workers=workers.max_workers,
        use_gpu=workers.use_gpu,
        placement_strategy=workers.placement.upper(),
        resources_per_worker={"CPU": workers.cpus_per_worker} | ({"GPU": 1} if workers.use_gpu else {}),
    )
    trainer = Trainer(
        run_worker,  # type: ignore[arg-type]
        train_loop_config=pack_job(job, checkpoint=start_checkpoint(config.run)),
        torch_config=Rendezvous(),
        scaling_config=scaling_config,
        run_config=RunConfig(  # type: ignore[call-arg]
            name=config.run.name,
            storage_path=path,
            storage_filesystem=filesystem,
            failure_config=failure_config,
            checkpoint_config=CheckpointConfig(num_to_keep=config.run.num_checkpoints_kept),
            worker_runtime_env={"env_vars": worker_environment(config)},
        ),
    )
    trainer.failure_policy = RestartPolicy(
        failure_config,
        directory=config.run.directory,
        max_wait_minutes=config.run.max_wait_minutes,
        mailbox=job.mailbox,
    )
    if workers.min_workers < workers.max_workers:
        trainer.scaling_policy = ElasticPolicy(
            scaling_config,
            possible=config.possible_num_workers,
            data_cpus=data_cpus,
            directory=config.run.directory,
            mailbox=job.mailbox,
        )
    return trainer
