"""Read the per-sample state of contrastive losses from the checkpoints of training runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor


def sample_states(outcome: dict[str, Any], step: int) -> dict[str, Tensor]:
    """Return the columns (2, N) of the samples' state in a checkpoint, joined over the ranks that wrote it, by sample ID.

    A task without such a state has no columns.
    """
    directory = Path(outcome["directory"]) / f"checkpoint-{step:08d}"
    # Another number of workers may have been killed while it saved the same step, and have left some of its files.
    num_writers = json.loads((directory / "files-00000.json").read_text())["world_size"]
    parts = [load_file(file) for file in sorted(directory.glob(f"samples-*-of-{num_writers:05d}.safetensors"))]
    assert len(parts) in (0, num_writers)
    columns = {}
    for name in parts[0] if parts else ():
        whole = torch.full((2, sum(part[name].shape[1] for part in parts)), torch.nan)
        for rank, part in enumerate(parts):
            whole[:, rank :: len(parts)] = part[name]
        columns[name] = whole
    return columns
