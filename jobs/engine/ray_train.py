"""Trains with Ray Train: the trainer of a run with its workers, environment, storage and policies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pyarrow.fs import FileType
from ray.train import FailureConfig, RunConfig, ScalingConfig, UserCallback
from ray.train.torch import TorchTrainer
from ray.train.v2.api.exceptions import TrainingFailedError

from jobs.engine.config import TrainingConfig
from jobs.engine.elasticity import ElasticPolicy
from jobs.engine.ray_failures import CheckpointRecord, RestartPolicy, as_fatal
from jobs.engine.ray_private import forget_snapshot, loopback_rendezvous, set_policies
from jobs.engine.ray_worker import export_worker, pack_job, run_worker
from jobs.engine.resumption import start_checkpoint
from jobs.engine.worker import WorkerJob, worker_environment
from pipelines.storage import resolve

_EXPORT_DIRECTORY = ".export"


def train_with_ray(
    config: TrainingConfig, job: WorkerJob, *, data_cpus: float, callbacks: Sequence[UserCallback] = ()
) -> dict[str, Any]:
    """Train from the newest checkpoint that is whole, and return the result of rank 0 (`train_from_newest`)."""
    run, workers = config.run, config.workers
    failure_config = FailureConfig(max_failures=run.max_restarts)
    scaling_config = _scaling(config, placement_strategy=workers.placement.upper())
    forget_snapshot(run.directory)
    record = CheckpointRecord(run.directory, num_kept=run.num_checkpoints_kept)
    trainer = _trainer(
        run_worker,
        pack_job(job, directory=run.directory, checkpoint=start_checkpoint(run)),
        config,
        scaling_config,
        storage=run.resolved_storage,
        name=run.name,
        failure_config=failure_config,
        callbacks=[record, *callbacks],
    )
    scaling_policy = None
    if workers.min_workers < workers.max_workers:
        scaling_policy = ElasticPolicy(
            scaling_config,
            possible=config.possible_num_workers,
            data_cpus=data_cpus,
            directory=run.directory,
            mailbox=job.mailbox,
        )
    failure_policy = RestartPolicy(
        failure_config, directory=run.directory, max_wait_minutes=run.max_wait_minutes, mailbox=job.mailbox
    )
    set_policies(trainer, failure_policy=failure_policy, scaling_policy=scaling_policy)
    return _fit(trainer, config)


def export_with_ray(config: TrainingConfig, job: WorkerJob, *, checkpoint: str) -> dict[str, Any]:
    """Write the export of a checkpoint with workers of Ray Train, and return the result of rank 0."""
    directory = config.run.directory
    settings = pack_job(job, directory=directory, checkpoint=checkpoint)
    filesystem, path = resolve(f"{directory}/{_EXPORT_DIRECTORY}")
    try:
        return _fit(
            _trainer(export_worker, settings, config, _scaling(config), storage=directory, name=_EXPORT_DIRECTORY),
            config,
        )
    finally:
        if filesystem.get_file_info(path).type == FileType.Directory:
            filesystem.delete_dir(path)


def _scaling(config: TrainingConfig, **options: Any) -> ScalingConfig:
    workers = config.workers
    return ScalingConfig(
        num_workers=workers.max_workers,
        use_gpu=workers.use_gpu,
        resources_per_worker={"CPU": workers.cpus_per_worker} | ({"GPU": 1} if workers.use_gpu else {}),
        **options,
    )


def _trainer(
    function: Any,
    settings: dict[str, Any],
    config: TrainingConfig,
    scaling_config: ScalingConfig,
    *,
    storage: str,
    **options: Any,
) -> TorchTrainer:
    filesystem, path = resolve(storage)
    # Ray's annotations are those of Train V1; what is ignored here exists in Train V2, which is used at run time.
    return TorchTrainer(
        function,
        train_loop_config=settings,
        torch_config=loopback_rendezvous(),
        scaling_config=scaling_config,
        run_config=RunConfig(  # type: ignore[call-arg]
            storage_path=path,
            storage_filesystem=filesystem,
            worker_runtime_env={"env_vars": worker_environment(config)},
            **options,
        ),
    )


def _fit(trainer: TorchTrainer, config: TrainingConfig) -> dict[str, Any]:
    """Run the workers to their end and return the result of rank 0."""
    try:
        result: dict[str, Any] = trainer.fit().return_value  # type: ignore[attr-defined]  # Ray annotates Train V1
    except SystemExit as error:  # Ray Train handles Ctrl-C itself by ending the workers and then the process
        raise KeyboardInterrupt from error
    except TrainingFailedError as error:
        raise as_fatal(error, config.run.directory, max_wait_minutes=config.run.max_wait_minutes) from error
    return result
