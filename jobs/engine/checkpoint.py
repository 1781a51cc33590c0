"""Checkpoints: everything that a resumed run needs to reproduce the uninterrupted one.

A checkpoint holds DeepSpeed's shards (networks, optimizers, schedules), what the task adds to them (per-sample state),
`state.json` with the step and the counters of the run, and from every worker a list of its files
(`jobs.engine.resumption`). Random number generators are seeded anew at every step. Only tensors, plain containers and
DeepSpeed's own records are ever unpickled.
"""

from __future__ import annotations

import atexit
import copyreg
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pyarrow.fs
import torch
import torch.distributed as dist
from deepspeed import DeepSpeedEngine
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address
from torch import Tensor, nn

from jobs.engine.config import TrainingConfig
from jobs.engine.deepspeed_engine import keeping_settings
from jobs.engine.resumption import FatalTrainingError, find_changed_file, naming_full_disk, write_file_list
from jobs.engine.worker import WorkerContext
from pipelines.plan import StreamPlan
from pipelines.storage import resolve
from pipelines.store_errors import names_written_store

# Pickle this enum by value: Python 3.11.2 (Debian 12) pickles it as a call of getattr, which `weights_only=True` refuses.
copyreg.pickle(ZeroStageEnum, lambda stage: (ZeroStageEnum, (stage.value,)))

_TAG = "deepspeed"
_STATE_FILE = "state.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """Progress of a run after `step` optimizer steps; its position in the data is step · batch size."""

    step: int = 0
    world_size: int = 0
    seconds_trained: float = 0.0
    num_units: int = 0
    """Number of units (tokens, pairs) trained on so far."""
    best_rating: float | None = None
    """Rating of the model exported so far; None if nothing was exported yet or the task exports its last model."""
    unsent_metrics: list[list[Any]] = field(default_factory=list)
    """Metrics that MLflow has not received yet (`MetricLogger.unsent`), saved so that they survive the process."""
    num_threads: int = 0
    """Number of PyTorch threads of every worker; 0 if it was not set."""
    validations: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    """Step and scores of every validation so far."""
    order_version: int = 1
    """Version of the order in which training data are read (`pipelines.plan.StreamPlan.order_version`)."""
    data_identity: dict[str, str] = field(default_factory=dict)
    """Hashes of the training data (`pipelines.plan.StreamPlan.identity`); those that the run never knew are absent."""
    store_retries: int = 0
    """Number of requests to object stores that were repeated (`pipelines.store_errors`)."""
    batches_digest: str = ""
    """Hash of the items of every batch so far, in order; empty at the beginning."""
    failure: str = ""
    """Why the run has failed beside others; empty if it has not."""
    members: list[dict[str, Any]] = field(default_factory=list)
    """Of several runs that train side by side: ratings, unsent metrics, validations and failure of every one."""

    def of_runs(self, number: int) -> list[dict[str, Any]]:
        """Return what belongs to every one of so many runs alone."""
        own = {name: getattr(self, name) for name in ("best_rating", "unsent_metrics", "validations", "failure")}
        return self.members or [own] * number


class DamagedCheckpointError(RuntimeError):
    """A checkpoint differs from what was written; every worker raises this error with the same message."""


class SafeCheckpointEngine(TorchCheckpointEngine):
    """Reads DeepSpeed's checkpoint files with `weights_only=True`, and writes them so that a full disk is recognised."""

    def __init__(self, frozen: frozenset[str] = frozenset()) -> None:
        super().__init__()
        self._frozen = frozen

    def save(self, state_dict: Any, path: str) -> None:
        """Save through a Python file object, because torch's own file writer does not report that the disk is full."""
        if self._frozen and isinstance(state_dict.get("module"), dict):
            kept = {name: value for name, value in state_dict["module"].items() if name not in self._frozen}
            state_dict = {**state_dict, "module": kept}
        with naming_full_disk(path), open(path, "wb") as file:
            torch.save(state_dict, file)

    def load(self, path: str, map_location: Any = None) -> Any:
        """Load tensors, plain containers and DeepSpeed's own records; anything else in the file is an error."""
        with torch.serialization.safe_globals([LossScaler, ZeroStageEnum, fragment_address]):
            return torch.load(path, map_location=map_location, weights_only=True)


def save_checkpoint(
    engine: DeepSpeedEngine,
    state: RunState,
    save_more: Callable[[Path], None],
    context: WorkerContext,
    metrics: Mapping[str, float],
) -> None:
    """Write this rank's part of a checkpoint and report it (`WorkerContext.report`); all ranks must call this."""
    directory = Path(tempfile.mkdtemp(dir=_process_directory()))
    engine.checkpoint_engine = SafeCheckpointEngine(frozen_names(engine.module))
    try:
        with naming_full_disk(directory):
            engine.save_checkpoint(str(directory), tag=_TAG, save_latest=False, exclude_frozen_parameters=True)
            save_more(directory)
            if context.rank == 0:
                (directory / _STATE_FILE).write_text(json.dumps(asdict(state)))
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    context.report(metrics, directory, step=state.step)


_PREFIX = "tempnet-checkpoints-"


@cache
def _process_directory() -> Path:
    """Return this process's directory for checkpoints that wait, locked as long as it lives; delete those of dead ones."""
    for left in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):  # another user's
            descriptor = os.open(left, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left)
            finally:
                os.close(descriptor)
    while True:
        directory = Path(tempfile.mkdtemp(prefix=_PREFIX))
        with suppress(FileNotFoundError):  # another process may have found it before it was locked
            fcntl.flock(os.open(directory, os.O_RDONLY), fcntl.LOCK_SH)
            if directory.exists():
                atexit.register(shutil.rmtree, directory, ignore_errors=True)
                return directory


def upload_part(directory: Path, uri: str, *, rank: int, world_size: int, group: str) -> None:
    """List the files of a rank's part of a checkpoint, copy them to the run's storage, and delete them here in any case."""
    try:
        with naming_full_disk(directory):
            write_file_list(directory, rank=rank, world_size=world_size, group=group)
        _copy(uri, directory)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@names_written_store
def _copy(uri: str, directory: Path) -> None:
    filesystem, place = resolve(uri)
    with naming_full_disk(place):
        filesystem.create_dir(place, recursive=True)
        pyarrow.fs.copy_files(str(directory), place, destination_filesystem=filesystem)


def frozen_names(module: nn.Module) -> frozenset[str]:
    """Return all names of the weights that are not trained; DeepSpeed knows only one name of a weight that is tied."""
    parameters = module.named_parameters(remove_duplicate=False)
    return frozenset(name for name, parameter in parameters if not parameter.requires_grad)


def check_checkpoint(directory: Path, *, rank: int, world_size: int, group: dist.ProcessGroup | None) -> None:
    """Verify the digests of all files; each worker checks its share. All ranks must call this."""
    problems: list[str] = [""] * world_size
    dist.all_gather_object(problems, find_changed_file(directory, rank=rank, world_size=world_size), group=group)
    if any(problems):
        raise DamagedCheckpointError("; ".join(filter(None, problems)))


def read_state(directory: Path, config: TrainingConfig, plan: StreamPlan) -> RunState:
    """Read the state of the run from a checkpoint, without what concerns another run alone whose checkpoint it is."""
    state = RunState(**json.loads((directory / _STATE_FILE).read_text()))
    if state.order_version != plan.order_version:
        raise FatalTrainingError(
            f"the checkpoint of step {state.step} was written by a program that reads these data in another order (version "
            f"{state.order_version}; this program has version {plan.order_version}), so that some samples would be repeated "
            "and others left out: finish the run with the program that began it, or begin again under another run.name"
        )
    if changed := [name for name, digest in plan.identity.items() if state.data_identity.get(name, digest) != digest]:
        raise FatalTrainingError(
            f"the training data are not those of the checkpoint of step {state.step}, they have other "
            f"{' and '.join(changed)}: restore the data that the run began with, or begin again under another run.name"
        )
    if state.step == config.run.start_step:  # the run's own checkpoints are of later steps
        return replace(state, best_rating=None, unsent_metrics=[], store_retries=0, batches_digest="")
    return state


def load_checkpoint(
    engine: DeepSpeedEngine, directory: Path, load_more: Callable[[Path, int], None], *, num_writers: int
) -> None:
    """Restore weights, moments, schedules and what `save_more` wrote; the optimizer keeps the settings that it has."""
    engine.checkpoint_engine = SafeCheckpointEngine()
    is_divided = num_writers != engine.dp_world_size and engine.zero_optimization()
    has_partitions = is_divided and engine.zero_optimization_stage() == ZeroStageEnum.weights
    with keeping_settings(engine.optimizer, engine.lr_scheduler):
        read = partial(engine.checkpoint_engine.load, map_location="cpu")
        if has_partitions:
            load_partitions(engine, directory / _TAG, read, num_writers=num_writers)
        else:
            engine.load_checkpoint(
                str(directory), tag=_TAG, load_module_strict=False, load_optimizer_states=not is_divided
            )
            if is_divided:
                load_moments(engine, directory / _TAG, read, num_writers=num_writers)
    # Fused AdamW counts steps on the device of the weights; a checkpoint may have been read or written on the CPU.
    for weights, moments in getattr(engine.optimizer, "optimizer", engine.optimizer).state.items():
        if "step" in moments:
            moments["step"] = moments["step"].to(weights.device)
    load_more(directory, num_writers)


# ---- on another number of workers than wrote it, which DeepSpeed refuses ---------------------------------------------
#
# ZeRO 1 and 2 flatten every parameter group into one vector and partition it among the workers. A checkpoint records where
# each parameter's fragment lies in each partition, so the moments of whole parameters can be reassembled here.
#
# ZeRO 3 partitions every parameter by itself: worker r of W holds the values r·⌈n/W⌉ to (r + 1)·⌈n/W⌉ of its n values, the
# last of them padded with zeros, and its vectors are these pieces of all parameters in a row.

MOMENTS = ("exp_avg", "exp_avg_sq")


def load_moments(engine: DeepSpeedEngine, directory: Path, read: Callable[[str], Any], *, num_writers: int) -> None:
    """Set AdamW's moments and step count from the partitions of all workers that wrote the checkpoint."""
    saved = [read(str(file))["optimizer_state_dict"] for file in _parts(directory, num_writers)]
    moments, num_steps = _whole_moments(saved)
    zero = engine.optimizer
    names = {parameter: name for name, parameter in engine.module.named_parameters()}
    for group, flat_weights in enumerate(zero.single_partition_of_fp32_groups):
        state = {key: torch.zeros_like(flat_weights) for key in MOMENTS}
        for parameter in zero.bit16_groups[group]:
            mapping = parameter._hp_mapping
            if mapping is None:  # other workers hold the whole parameter
                continue
            wanted, place = mapping.lp_fragment_address, mapping.hp_fragment_address
            for key in MOMENTS:
                fragment = moments[names[parameter]][key][wanted.start : wanted.start + wanted.numel]
                state[key][place.start : place.start + place.numel] = fragment
        zero.optimizer.state[flat_weights] = {"step": num_steps.clone(), **state}


def _whole_moments(parts: list[dict[str, Any]]) -> tuple[dict[str, dict[str, Tensor]], Tensor]:
    """Return parameter name → moment name → whole flat moment (n,), and the number of optimizer steps taken."""
    fragments: dict[str, dict[str, list[Tensor]]] = {}
    num_steps = torch.zeros(())
    for part in parts:
        states = part["base_optimizer_state"]["state"]
        for group, mapping in enumerate(part["param_slice_mappings"]):
            for name, place in mapping.items():
                kept = fragments.setdefault(name, {key: [] for key in MOMENTS})
                for key in MOMENTS:
                    kept[key].append(states[group][key].flatten()[place.start : place.start + place.numel])
                num_steps = torch.as_tensor(states[group]["step"])
    whole = {name: {key: torch.cat(pieces) for key, pieces in kept.items()} for name, kept in fragments.items()}
    return whole, num_steps


def load_partitions(engine: DeepSpeedEngine, directory: Path, read: Callable[[str], Any], *, num_writers: int) -> None:
    """Load a checkpoint under ZeRO 3, from the partitions of all workers that wrote it; all workers must call this."""
    zero = engine.optimizer
    saved = [read(str(file))["optimizer_state_dict"] for file in _parts(directory, num_writers)]
    sizes = [parameter.ds_numel for group in zero.fp16_groups for parameter in group]
    lengths = [len(flat) for flat in zero.fp32_partitioned_groups_flat]
    rank, world_size = engine.global_rank, engine.dp_world_size

    def divide(vectors: Sequence[Sequence[Tensor]]) -> Sequence[Tensor]:
        whole = [torch.cat(list(groups)) for groups in vectors]
        return repartition(whole, sizes, rank=rank, world_size=world_size).split(lengths)

    states = [part["optimizer_state_dict"]["state"] for part in saved]
    moments = {key: divide([[state[group][key] for group in sorted(state)] for state in states]) for key in MOMENTS}
    num_steps = states[0][0]["step"]
    zero._set_fp32_optimizer_param_groups()
    optimizer = zero.optimizer.state_dict()
    zero._clear_fp32_optimizer_param_groups()
    optimizer["state"] = {
        group: {"step": num_steps.clone(), **{key: moments[key][group] for key in MOMENTS}}
        for group in range(len(lengths))
    }
    zero.checkpoint_event_prologue()
    with tempfile.TemporaryDirectory(prefix="tempnet-checkpoint-") as place:
        # What is the same on all ranks, such as schedules, is found under this rank's name.
        file = "zero_pp_rank_{}_mp_rank_00_model_states.pt"
        (own := Path(place) / directory.name / file.format(rank)).parent.mkdir()
        own.symlink_to((directory / file.format(rank % num_writers)).resolve())
        # `load_checkpoint` would look for the partitions too.
        engine._load_checkpoint(place, directory.name, load_module_strict=False)
    zero._rigid_load_state_dict(
        saved[0]
        | {"optimizer_state_dict": optimizer, "fp32_flat_groups": divide([part["fp32_flat_groups"] for part in saved])}
    )
    zero.checkpoint_event_epilogue()


def repartition(vectors: Sequence[Tensor], sizes: Sequence[int], *, rank: int, world_size: int) -> Tensor:
    """Return a worker's vector from those of all workers of a group of another size."""
    pieces, at = [], 0
    for size in sizes:
        old, new = (-(-size // count) for count in (len(vectors), world_size))
        whole = vectors[0].new_zeros(max(old * len(vectors), new * world_size))
        whole[: old * len(vectors)] = torch.cat([vector[at : at + old] for vector in vectors])
        whole[size:] = 0
        pieces.append(whole[rank * new : (rank + 1) * new])
        at += old
    return torch.cat(pieces) if pieces else torch.zeros(0)


def _parts(directory: Path, num_writers: int) -> list[Path]:
    """Return the optimizer files of all writers in the order of their ranks; an earlier, larger group may have left more."""
    pattern = "*zero_pp_rank_{}_*_optim_states.pt"
    files = [file for rank in range(num_writers) for file in directory.glob(pattern.format(rank))]
    if len(files) != num_writers:
        raise FileNotFoundError(f"{directory} holds {len(files)} of {num_writers} workers' optimizer states")
    return files
