"""Makes an export from a checkpoint of a run that may have ended long ago, with the workers of Ray Train."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, replace
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from pyarrow.fs import FileType
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from jobs.engine.checkpoint_files import find_damage
from jobs.engine.cluster import check_resources, start_ray
from jobs.engine.config import TrainingConfig
from jobs.engine.fields import resolve_fields, with_absolute_paths
from jobs.engine.job import FatalTrainingError, WorkerJob
from jobs.engine.masking import masked
from jobs.engine.ray_private import loopback_rendezvous
from jobs.engine.resumption import whole_checkpoints
from jobs.engine.task import Plan
from jobs.engine.trainer import run_trainer, worker_environment
from jobs.engine.worker import export_worker, pack_job
from pipelines.storage import exists, read_json, resolve, write_json

_DIRECTORY = ".export"


@dataclass(frozen=True, slots=True, kw_only=True)
class LateExport:
    """What is exported, and where to."""

    checkpoint: str
    """Path or URI of the checkpoint."""
    step: int
    """Step of the checkpoint."""
    output: str
    """Directory or URI of the export."""
    num_writers: int
    """Number of workers that wrote the checkpoint."""


def find_checkpoint(directory: str, step: int | None, output: str) -> LateExport:
    """Choose the checkpoint of a run's directory: that of a step, or the newest.

    Args:
        directory: path or URI of the run.
        step: step of the checkpoint; None: the newest that is whole.
        output: where to write the export; if empty, `export-<step>` in the directory of the run.

    Raises:
        ValueError: if the run has no such checkpoint, or something is at the output already.
    """
    kept = whole_checkpoints(directory)
    if not kept:
        raise ValueError(f"{directory} has no checkpoint that is whole")
    names = {number: name for name, number in kept.items()}
    chosen = max(names) if step is None else step
    if chosen not in names:
        damage = find_damage(f"{directory}/checkpoint-{chosen:08d}")
        steps = ", ".join(map(str, sorted(names)))
        raise ValueError(
            f"step = {chosen}: {damage or 'it was not kept'}; {directory} has the checkpoints of steps {steps}"
        )
    output = output.rstrip("/") or f"{directory}/export-{chosen}"
    if exists(output):
        raise ValueError(f"output = {output!r} exists: delete it, or choose another directory")
    checkpoint = f"{directory}/{names[chosen]}"
    state = read_json(f"{checkpoint}/state.json") or {}
    return LateExport(checkpoint=checkpoint, step=chosen, output=output, num_writers=state["world_size"])


def configure(config: TrainingConfig, late: LateExport) -> TrainingConfig:
    """Return the configuration of the run for its export: its output, no tracking, and as few workers as can be.

    Under ZeRO 3, which divides the weights because they are too many for one worker, there are as many as wrote it.
    """
    workers = replace(config.workers, num_workers=late.num_writers if config.workers.zero_stage == 3 else 1)
    return replace(
        config,
        run=replace(config.run, export=late.output),
        workers=workers,
        tracking=replace(config.tracking, uri="", enabled=False),
    )


def make_late_export(plan: Plan, late: LateExport) -> None:
    """Load the checkpoint on workers and write the export. Ray is started if needed.

    Raises:
        ValueError: if the cluster is too small, or the plan refuses its data.
        FatalTrainingError: if the checkpoint cannot be used.
        KeyboardInterrupt: on Ctrl-C.
    """
    config = plan.config
    workers = config.workers
    start_ray()
    check_resources(
        num_workers=workers.max_workers,
        cpus_per_worker=workers.cpus_per_worker,
        use_gpu=workers.use_gpu,
        data_cpus=plan.data_cpus,
    )
    prepared = plan.prepare()
    job = WorkerJob(create_task=prepared.create_task, tracked_run=None, mailbox=None, with_bar=False)
    filesystem, path = resolve(config.run.directory)
    trainer = TorchTrainer(
        export_worker,  # type: ignore[arg-type]  # Ray's annotations are those of Train V1
        torch_config=loopback_rendezvous(),
        train_loop_config=pack_job(job, directory=config.run.directory, checkpoint=late.checkpoint),
        scaling_config=ScalingConfig(
            num_workers=workers.max_workers,
            use_gpu=workers.use_gpu,
            resources_per_worker={"CPU": workers.cpus_per_worker} | ({"GPU": 1} if workers.use_gpu else {}),
        ),
        run_config=RunConfig(  # type: ignore[call-arg]
            name=_DIRECTORY,
            storage_path=path,
            storage_filesystem=filesystem,
            worker_runtime_env={"env_vars": worker_environment(config)},
        ),
    )
    try:
        result = run_trainer(trainer)
    finally:
        if filesystem.get_file_info(f"{path}/{_DIRECTORY}").type == FileType.Directory:
            filesystem.delete_dir(f"{path}/{_DIRECTORY}")
    if "fatal" in result:
        raise FatalTrainingError(result["fatal"])


Config = TypeVar("Config")

_FILE = "task.json"


def write_task(config: TrainingConfig) -> None:
    """Write the configuration, with absolute paths and without passwords, into the directory of the run."""
    run = dataclasses.replace(config.run, storage=config.run.resolved_storage)
    values = dataclasses.asdict(with_absolute_paths(resolve_fields(dataclasses.replace(config, run=run))))
    write_json(
        f"{config.run.directory}/{_FILE}",
        {"configuration_class": type(config).__name__, "configuration": masked(values)},
    )


def read_task(directory: str) -> tuple[str, dict[str, Any]]:
    """Return the name of the class of a run's configuration, and the values that :func:`configuration_from` takes.

    Raises:
        FileNotFoundError: if the directory holds no record of a run.
        ValueError: if the record is damaged.
    """
    content = read_json(f"{directory}/{_FILE}")
    if content is None:
        raise FileNotFoundError(
            f"{directory} holds no {_FILE}: it is not the directory of a run, or the run is of an older version; start the "
            "command of the run again, which writes the file"
        )
    try:
        return content["configuration_class"], content["configuration"]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{directory}/{_FILE} is damaged: it does not hold a configuration") from error


def configuration_from(kind: type[Config], values: dict[str, Any]) -> Config:
    """Return the configuration whose nested values are given; lists become tuples where the field is a tuple.

    Raises:
        ValueError: if a value is refused, or a field is unknown.
    """
    hints = get_type_hints(kind)
    known = {item.name for item in dataclasses.fields(kind)}  # type: ignore[arg-type]  # a dataclass
    if unknown := sorted(values.keys() - known):
        raise ValueError(f"{kind.__name__} has no field {', '.join(unknown)}: the run is of another version")
    return kind(**{name: _value(hints[name], value) for name, value in values.items()})


def _value(hint: Any, value: Any) -> Any:
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return configuration_from(hint, value)
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    if isinstance(value, list) and any(get_origin(kind) is tuple for kind in kinds):
        return tuple(value)
    return value
