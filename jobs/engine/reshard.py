"""Loads the optimizer state of a ZeRO 1 or 2 checkpoint on another number of workers.

DeepSpeed flattens every parameter group into one vector, partitions it among the workers, and refuses to load the
partitions on another number of workers. A checkpoint records where each parameter's fragment lies in each partition, so
the moments of whole parameters can be reassembled here. The engine then states which fragments of them it needs.
"""

from __future__ import annotations

from collections.abc import Callable
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
