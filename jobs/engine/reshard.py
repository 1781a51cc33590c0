"""Loads a ZeRO checkpoint on another number of workers than wrote it, which DeepSpeed refuses to do.

ZeRO 1 and 2 flatten every parameter group into one vector and partition it among the workers. A checkpoint records where
each parameter's fragment lies in each partition, so the moments of whole parameters can be reassembled here. The engine
then states which fragments of them it needs.

ZeRO 3 partitions every parameter by itself: worker r of W holds the values r·⌈n/W⌉ to (r + 1)·⌈n/W⌉ of its n values, the
last of them padded with zeros, and its vectors are these pieces of all parameters in a row.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from torch import Tensor

MOMENTS = ("exp_avg", "exp_avg_sq")


def load_moments(engine: DeepSpeedEngine, directory: Path, read: Callable[[str], Any], *, num_writers: int) -> None:
    """Set AdamW's moments and step count from the partitions of all workers that wrote the checkpoint.

    Args:
        engine: a new engine with a ZeRO 1 or 2 optimizer, whose weights are already restored.
        directory: directory of DeepSpeed's files in the checkpoint.
        read: reads one of these files, unpickling only tensors and DeepSpeed's own records.
        num_writers: how many workers wrote the checkpoint.
    """
    files = _parts(directory, num_writers)
    moments, num_steps = _whole_moments([read(str(file))["optimizer_state_dict"] for file in files])
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
    """Load a checkpoint under ZeRO 3, with weights and optimizer state from the partitions of all workers that wrote it.

    The arguments are those of :func:`load_moments`; all workers must call this.
    """
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
    with _with_own_file(directory, rank=rank, num_writers=num_writers) as place:
        # `load_checkpoint` would look for the partitions too.
        engine._load_checkpoint(str(place), directory.name, load_module_strict=False)
    zero._rigid_load_state_dict(
        saved[0]
        | {"optimizer_state_dict": optimizer, "fp32_flat_groups": divide([part["fp32_flat_groups"] for part in saved])}
    )
    zero.checkpoint_event_epilogue()


def repartition(vectors: Sequence[Tensor], sizes: Sequence[int], *, rank: int, world_size: int) -> Tensor:
    """Return a worker's vector from those of all workers of a group of another size.

    Args:
        vectors: vector of every worker that wrote, by rank; each holds its pieces of all parameters in a row.
        sizes: number of values of every parameter.
        rank: rank of the worker in its group.
        world_size: number of workers in its group.
    """
    pieces, at = [], 0
    for size in sizes:
        old, new = (-(-size // count) for count in (len(vectors), world_size))
        whole = vectors[0].new_zeros(max(old * len(vectors), new * world_size))
        whole[: old * len(vectors)] = torch.cat([vector[at : at + old] for vector in vectors])
        whole[size:] = 0
        pieces.append(whole[rank * new : (rank + 1) * new])
        at += old
    return torch.cat(pieces) if pieces else torch.zeros(0)


@contextmanager
def _with_own_file(directory: Path, *, rank: int, num_writers: int) -> Iterator[Path]:
    """Yield a directory in which DeepSpeed finds, under the name of this rank, what a rank that wrote has saved beside
    its partitions: schedules, buffers and counters, which are the same on all ranks.

    Args:
        directory: directory of DeepSpeed's files in the checkpoint.
        rank: rank of this worker.
        num_writers: how many workers wrote the checkpoint.
    """
    with tempfile.TemporaryDirectory(prefix="tempnet-checkpoint-") as name:
        (view := Path(name) / directory.name).mkdir()
        file = "zero_pp_rank_{}_mp_rank_00_model_states.pt"
        (view / file.format(rank)).symlink_to((directory / file.format(rank % num_writers)).resolve())
        yield Path(name)


def _parts(directory: Path, num_writers: int) -> list[Path]:
    """Return the optimizer files of all writers in the order of their ranks.

    Files of higher ranks are ignored: an earlier, larger group of workers left them.

    Raises:
        FileNotFoundError: if files are missing.
    """

    def rank(file: Path) -> int:
        return int(file.name.split("zero_pp_rank_")[1].split("_")[0])

    files = [file for file in directory.glob("*zero_pp_rank_*_optim_states.pt") if rank(file) < num_writers]
    if len(files) != num_writers:
        raise FileNotFoundError(f"{directory} holds {len(files)} of {num_writers} workers' optimizer states")
    return sorted(files, key=rank)
