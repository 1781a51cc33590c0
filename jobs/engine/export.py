"""Exports: how one is written, what tells models apart, and one that is made of a checkpoint after the run has ended."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import pyarrow.fs
from transformers import AutoConfig

from jobs.engine.config import TrainingConfig, resolve_directory
from jobs.engine.fields import resolve_fields, with_absolute_paths
from jobs.engine.masking import masked
from jobs.engine.resumption import FatalTrainingError, find_damage, whole_checkpoints
from jobs.engine.task import Plan
from jobs.engine.worker import WorkerJob, train_here
from pipelines.local_copy import local_copy
from pipelines.storage import exists, read_json, resolve, write_json
from tempnet.fingerprints import files_digest
from tempnet.network import TempNet


@contextmanager
def open_export(uri: str) -> Iterator[Path]:
    """Yield a local directory to write into, whose content is copied to `uri` at the end of the block.

    Files of an earlier export at `uri` are overwritten if they have the same names, and kept otherwise.
    """
    with tempfile.TemporaryDirectory(prefix="tempnet-export-") as name:
        yield Path(name)
        filesystem, path = resolve(uri)
        filesystem.create_dir(path, recursive=True)
        pyarrow.fs.copy_files(name, path, destination_filesystem=filesystem)


_DIGEST_SIZE = 12


def model_digest(model: str, *, trust_remote_code: bool = False) -> str:
    """Return a digest (24 hex digits) of a model: of its name and commit if it is on the hub, else of its files."""
    model = local_copy(model)
    if Path(model).is_dir():
        return files_digest(sorted(path for path in Path(model).iterdir() if path.is_file()))
    config = AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
    name = f"{model}@{getattr(config, '_commit_hash', None)}"
    return hashlib.blake2b(name.encode(), digest_size=_DIGEST_SIZE).hexdigest()


def tempnet_digest(network: TempNet) -> str:
    """Return a digest (24 hex digits) of a TempNet's configuration and weights."""
    content = json.dumps(dataclasses.asdict(network.config), sort_keys=True)
    digest = hashlib.blake2b(content.encode(), digest_size=_DIGEST_SIZE)
    for name, value in sorted(network.state_dict().items()):
        digest.update(name.encode())
        digest.update(value.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


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
    """Choose the checkpoint of a run's directory: that of a step, or the newest."""
    names = {number: name for name, number in whole_checkpoints(directory).items()}
    if not names:
        raise ValueError(f"{directory} has no checkpoint that is whole")
    chosen = max(names) if step is None else step
    if chosen not in names:
        damage = find_damage(f"{directory}/checkpoint-{chosen:08d}")
        steps = ", ".join(map(str, sorted(names)))
        raise ValueError(
            f"step = {chosen}: {damage or 'it was not kept'}; {directory} has the checkpoints of steps {steps}"
        )
    output = resolve_directory("output", output or f"{directory}/export-{chosen}")
    if exists(output):
        raise ValueError(f"output = {output!r} exists: delete it, or choose another directory")
    checkpoint = f"{directory}/{names[chosen]}"
    state = read_json(f"{checkpoint}/state.json") or {}
    return LateExport(checkpoint=checkpoint, step=chosen, output=output, num_writers=state["world_size"])


def configure(config: TrainingConfig, late: LateExport) -> TrainingConfig:
    """Return the configuration of the run for its export: its output, no tracking, and one worker, or all under ZeRO 3."""
    is_divided = config.workers.zero_stage == 3 and not config.workers.local
    return replace(
        config,
        run=replace(config.run, export=late.output),
        workers=replace(config.workers, num_workers=late.num_writers if is_divided else 1),
        tracking=replace(config.tracking, uri="", enabled=False),
    )


def make_late_export(plan: Plan, late: LateExport) -> None:
    """Load the checkpoint on workers, or with `workers.local` in this process, and write the export."""
    job = WorkerJob(create_task=plan.prepare_with_room().create_task, exported=late.checkpoint)
    if plan.config.workers.local:
        result = train_here(job, plan.config)
    else:
        from jobs.engine.ray_train import export_with_ray

        result = export_with_ray(plan.config, job)
    if "fatal" in result:
        raise FatalTrainingError(result["fatal"])


Config = TypeVar("Config")

_TASK_FILE = "task.json"


def write_task(config: TrainingConfig) -> None:
    """Write the configuration, with absolute paths and without passwords, into the directory of the run."""
    values = dataclasses.asdict(with_absolute_paths(resolve_fields(replace(config, run=config.run.resolved))))
    write_json(
        f"{config.run.directory}/{_TASK_FILE}",
        {"configuration_class": type(config).__name__, "configuration": masked(values)},
    )


def read_task(directory: str) -> tuple[str, dict[str, Any]]:
    """Return the name of the class of a run's configuration, and the values that :func:`configuration_from` takes."""
    content = read_json(f"{directory}/{_TASK_FILE}")
    if content is None:
        raise FileNotFoundError(
            f"{directory} holds no {_TASK_FILE}: it is not the directory of a run, or the run is of an older version; start "
            "the command of the run again, which writes the file"
        )
    try:
        return content["configuration_class"], content["configuration"]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{directory}/{_TASK_FILE} is damaged: it does not hold a configuration") from error


def configuration_from(kind: type[Config], values: dict[str, Any]) -> Config:
    """Return the configuration whose nested values are given; lists become tuples where the field is a tuple."""
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
