"""Trains with Ray Train: the trainer of a run, its workers, and how many of them there are.

Ray's controller imports this module, and needs neither torch nor Transformers nor DeepSpeed, which would cost seconds and
half a gigabyte at every start. So nothing here imports them at the top, and the job is passed as pickled bytes.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from pyarrow.fs import FileType, LocalFileSystem
from ray import cloudpickle
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig, UserCallback
from ray.train.v2.api.exceptions import TrainingFailedError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from jobs.engine.cluster import answers
from jobs.engine.config import TrainingConfig
from jobs.engine.console import Fetched, Mailbox, say_to
from jobs.engine.ray_failures import CheckpointRecord, RestartPolicy, as_fatal
from jobs.engine.ray_private import (
    NoopDecision,
    ResizeDecision,
    ScalingDecision,
    ScalingPolicy,
    forget_snapshot,
    free_resources,
    loopback_rendezvous,
    set_policies,
    wait_until_started,
)
from jobs.engine.resumption import checkpoint_name, registered_step, start_checkpoint
from jobs.engine.worker import WorkerContext, WorkerJob, train_from_newest, worker_environment
from pipelines.storage import exists, resolve

if TYPE_CHECKING:
    from ray.train.torch import TorchTrainer

_EXPORT_DIRECTORY = ".export"


def train_with_ray(
    config: TrainingConfig, job: WorkerJob, *, data_cpus: float, callbacks: Sequence[UserCallback] = ()
) -> dict[str, Any]:
    """Train from the newest checkpoint that is whole, and return the result of rank 0 (`train_from_newest`)."""
    run, workers = config.run, config.workers
    failure_config = FailureConfig(max_failures=run.max_restarts)
    forget_snapshot(run.directory)
    record = CheckpointRecord(run.directory, num_kept=run.num_checkpoints_kept)
    trainer = _trainer(
        config,
        job,
        storage=run.resolved_storage,
        name=run.name,
        failure_config=failure_config,
        callbacks=[record, *callbacks],
    )
    scaling_policy = None
    told = {"directory": run.directory, "mailbox": job.mailbox}
    if workers.min_workers < workers.max_workers:
        scaling_policy = ElasticPolicy(
            _scaling(config), possible=config.possible_num_workers, data_cpus=data_cpus, **told
        )
    failure_policy = RestartPolicy(failure_config, max_wait_minutes=run.max_wait_minutes, **told)
    set_policies(trainer, failure_policy=failure_policy, scaling_policy=scaling_policy)
    return _fit(trainer, config)


def export_with_ray(config: TrainingConfig, job: WorkerJob) -> dict[str, Any]:
    """Export a checkpoint with workers of Ray Train, and return the result of rank 0."""
    filesystem, path = resolve(f"{config.run.directory}/{_EXPORT_DIRECTORY}")
    try:
        return _fit(_trainer(config, job, storage=config.run.directory, name=_EXPORT_DIRECTORY), config)
    finally:
        if filesystem.get_file_info(path).type == FileType.Directory:
            filesystem.delete_dir(path)


def _scaling(config: TrainingConfig) -> ScalingConfig:
    workers = config.workers
    return ScalingConfig(
        num_workers=workers.max_workers,
        use_gpu=workers.use_gpu,
        resources_per_worker={"CPU": workers.cpus_per_worker} | ({"GPU": 1} if workers.use_gpu else {}),
        placement_strategy=workers.placement.upper(),
    )


def _trainer(config: TrainingConfig, job: WorkerJob, *, storage: str, **options: Any) -> TorchTrainer:
    from ray.train.torch import TorchTrainer

    filesystem, path = resolve(storage)
    # Ray's annotations are those of Train V1; what is ignored here exists in Train V2, which is used at run time.
    return TorchTrainer(
        run_worker,  # type: ignore[arg-type]  # it returns the result of the run
        train_loop_config={
            "job": cloudpickle.dumps(job),
            "directory": config.run.directory,
            "checkpoint": start_checkpoint(config.run),
        },
        torch_config=loopback_rendezvous(),
        scaling_config=_scaling(config),
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


# ---- on a worker -----------------------------------------------------------------------------------------------------


def run_worker(settings: dict[str, Any]) -> dict[str, Any]:
    """Unpack the job and train to the end of the run, or export the checkpoint."""
    gc.set_threshold(100_000)  # as `jobs.engine.command_line.run_job` does
    job, directory = cloudpickle.loads(settings["job"]), settings["directory"]
    return train_from_newest(job, ray_context(job, directory), directory=directory, checkpoint=settings["checkpoint"])


def ray_context(job: WorkerJob, run_directory: str) -> WorkerContext:
    """Return the context of this worker, and make the GPU that it was given PyTorch's current one."""
    import torch
    from ray.train.collective import broadcast_from_rank_zero
    from ray.train.torch import get_device

    from jobs.engine.ray_private import is_preempted

    if (device := get_device()).type == "cuda":
        torch.cuda.set_device(device)
    context = ray.train.get_context()
    return WorkerContext(
        rank=context.get_world_rank(),
        world_size=context.get_world_size(),
        local_world_size=context.get_local_world_size(),
        report=RayReport(run_directory, rank=context.get_world_rank(), world_size=context.get_world_size()),
        agree=broadcast_from_rank_zero,
        terminal=job.mailbox,
        is_preempted=is_preempted,
    )


class RemoteMailbox:
    """A `jobs.engine.console.Mailbox` in a small Ray actor, as the driver, the controller and the workers reach it."""

    def __init__(self) -> None:
        mailbox: Any = ray.remote(Mailbox)
        # On the driver's node, so that it is not lost with another one.
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        self._actor = mailbox.options(num_cpus=0, scheduling_strategy=here).remote()

    def __getattr__(self, name: str) -> Any:
        """Return a method of the mailbox that nobody waits for: `say`, `show`, `sign`, `ask_to_save` or `ask_to_stop`."""
        if name.startswith("_"):  # what pickle asks for before there is an actor
            raise AttributeError(name)
        return getattr(self._actor, name).remote

    def requests(self) -> tuple[bool, int] | None:
        """Return what the driver and Ray Train's controller have asked; None if they do not answer."""
        return self._ask("requests", seconds=30.0)

    def wait(self) -> None:
        wait_until_started(self._actor)

    def fetch(self) -> Fetched | None:
        """Return what has come since the last call; None if the actor does not answer."""
        return self._ask("fetch", seconds=10.0)

    def close(self) -> None:
        """End the actor: the packed job holds a handle too, so that Ray would keep it as long as this process lives."""
        with suppress(ray.exceptions.RayError):
            ray.kill(self._actor)

    def _ask(self, method: str, *, seconds: float) -> Any:
        try:
            return ray.get(getattr(self._actor, method).remote(), timeout=seconds)
        except ray.exceptions.RayError:
            return None  # the cluster is shutting down; the job itself reports why


class RayReport:
    """Reports metrics and this rank's part of a checkpoint to Ray Train; see `jobs.engine.worker.WorkerContext`."""

    def __init__(self, run_directory: str, *, rank: int, world_size: int) -> None:
        self._run_directory, self._rank, self._world_size = run_directory, rank, world_size

    def __call__(self, metrics: Mapping[str, float], directory: Path | None, *, step: int) -> None:
        """Report in the background, so that training goes on while the checkpoint is uploaded."""
        from ray.train import CheckpointUploadMode

        ray.train.report(
            {"step": step, **metrics},
            checkpoint=None if directory is None else Checkpoint.from_directory(str(directory)),
            checkpoint_dir_name=checkpoint_name(step),
            checkpoint_upload_mode=CheckpointUploadMode.ASYNC,
            checkpoint_upload_fn=partial(self._upload, failed=[]),
        )

    def _upload(self, checkpoint: Checkpoint, name: str, *, failed: list[Exception]) -> Checkpoint:
        """Copy this rank's files into the run's directory, and delete them here; Ray Train calls this in the background."""
        from jobs.engine.checkpoint import upload_part

        if failed:
            raise failed[0]
        uri = f"{self._run_directory}/{name}"
        filesystem, path = resolve(uri)
        # Workers share a placement group exactly if they were started together.
        group = ray.get_runtime_context().get_placement_group_id() or ""
        try:
            upload_part(Path(checkpoint.path), uri, rank=self._rank, world_size=self._world_size, group=group)
            if isinstance(filesystem, LocalFileSystem) and not exists(f"{self._run_directory}/configuration.json"):
                raise FileNotFoundError(
                    f"the node of worker {self._rank} does not see {self._run_directory}: give run.storage a directory or "
                    "URI that all nodes share"
                )
        except Exception as error:
            failed.append(error)
            raise
        return Checkpoint(path, filesystem)


# ---- how many workers a run has --------------------------------------------------------------------------------------
#
# Ray Train restarts the workers with another number when it is told to. Ray's own policy is not used: it counts what an
# autoscaler grants, leaves no CPUs for reading data, may choose a number that does not divide the batch, and saves nothing.

# The workers of a node that goes down may fail before the node's own process ends.
_SECONDS_TO_SETTLE = 3.0


class ElasticPolicy(ScalingPolicy):
    """Ray Train's scaling policy of a run whose number of workers may change.

    A number that could not be started within Ray Train's limit is followed by the next smaller one. Before the run grows,
    its workers are asked to save, so that no step is lost; without a mailbox it grows after the next checkpoint.
    """

    def __init__(
        self, scaling_config: ScalingConfig, *, possible: Sequence[int], data_cpus: float, directory: str, mailbox: Any
    ) -> None:
        super().__init__(scaling_config)  # type: ignore[arg-type]  # Ray annotates the class of Train V2
        self._possible = list(possible)
        self._resources: dict[str, float] = self.scaling_config._resources_per_worker_not_none
        self._data_cpus_per_worker = data_cpus / self._possible[-1]
        self._directory, self._mailbox = directory, mailbox
        self._running = 0
        self._attempted: int | None = None
        self._failed_at: float | None = None
        self._step_before_growth: int | None = None

    def make_decision_for_non_running_worker_group(self) -> ScalingDecision:
        """Choose the largest number of workers that the cluster's nodes can hold, whoever else uses them."""
        self._maybe_send_resource_request()
        now = time.monotonic()
        if self._running and self._failed_at is None:
            self._failed_at = now
        if self._failed_at is not None and now - self._failed_at < _SECONDS_TO_SETTLE:
            return NoopDecision()
        room = self._count_room(node["Resources"] for node in answering_nodes())
        fitting = [number for number in self._possible if number <= room]
        if self._attempted is not None:
            fitting = [number for number in fitting if number < self._attempted] or fitting
        number = fitting[-1] if fitting else self._possible[0]
        if number != (self._attempted or self._running or self._possible[-1]):
            most = self._possible[-1]
            say_to(self._mailbox, f"the cluster has room for {room} of {most} workers: the run goes on with {number}")
        self._attempted, self._failed_at, self._running, self._step_before_growth = number, None, 0, None
        return self._resize(number)

    def make_decision_for_running_worker_group(
        self, worker_group_state: Any, worker_group_status: Any
    ) -> ScalingDecision:
        """Choose a larger number of workers once the cluster has free room for them and the workers have saved."""
        self._maybe_send_resource_request()
        self._attempted, self._running = None, worker_group_state.num_workers
        number = self._find_larger(self._running)
        if number is None:
            self._step_before_growth = None
            return NoopDecision()
        step = registered_step(self._directory)
        if self._step_before_growth is None:
            self._step_before_growth = step
            if self._mailbox is not None:
                self._mailbox.ask_to_save()
        if step == self._step_before_growth:
            return NoopDecision()
        say_to(
            self._mailbox,
            f"the cluster has room for {number} workers: the run grows from {self._running}, from step {step}",
        )
        self._attempted, self._running, self._step_before_growth = number, 0, None
        return self._resize(number)

    def _find_larger(self, running: int) -> int | None:
        """Return the largest number of workers above those that run for which there is free room; None if there is none."""
        if running == self._possible[-1]:
            return None
        free = free_resources()
        if not self._count_room(free.values()):
            return None
        nodes = answering_nodes()
        # What readers of data leave free for a moment is not room, so both must hold.
        room = min(
            self._count_room(node["Resources"] for node in nodes),
            running + self._count_room(free.get(node["NodeID"], {}) for node in nodes),
        )
        return max((number for number in self._possible if running < number <= room), default=None)

    def _count_room(self, nodes: Iterable[Mapping[str, float]]) -> int:
        """Return how many workers fit into the nodes' resources, with the CPUs that their data take anywhere."""
        nodes = list(nodes)
        by_node = sum(
            min(int(node.get(name, 0.0) / amount + 1e-9) for name, amount in self._resources.items() if amount)
            for node in nodes
        )
        cpus = sum(node.get("CPU", 0.0) for node in nodes)
        cpus_per_worker = self._resources.get("CPU", 0.0) + self._data_cpus_per_worker
        return min(by_node, int(cpus / cpus_per_worker + 1e-9)) if cpus_per_worker else by_node

    def _get_num_workers_for_resource_request(self) -> int:
        return self._possible[-1]

    def _resize(self, number: int) -> ResizeDecision:
        return ResizeDecision(num_workers=number, resources_per_worker=self._resources)


def answering_nodes() -> list[dict[str, Any]]:
    """Return Ray's description of the nodes of the cluster that answer.

    A node that was lost stays in Ray's table of living nodes for half a minute, in which workers would be placed on it.
    """
    alive = [node for node in ray.nodes() if node["Alive"]]
    return [node for node in alive if answers(f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}")]
