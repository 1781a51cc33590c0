"""Converts batches of spans into tensors: trims padding to the longest span, and turns lengths into masks."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pipelines.stream import Batch


def span_tensors(batch: Batch, device: torch.device) -> dict[str, Tensor]:
    """Convert a batch into the arguments of `TemperatureSentenceEncoder`, except γ."""
    tensors = {"ids": torch.from_numpy(batch["ids"]).to(device)}
    for name in ("anchor", "positive"):
        lengths = batch[f"{name}_lengths"]
        width = int(lengths.max())
        mask = np.arange(width) < lengths[..., None]
        tensors[f"{name}_ids"] = _tensor(batch[f"{name}_ids"][..., :width], device)
        tensors[f"{name}_mask"] = _tensor(mask, device)
        if name == "anchor":
            tensors["mlm_labels"] = _tensor(batch["mlm_labels"][..., :width], device)
    return tensors


def _tensor(array: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(array.astype(np.int64)).to(device)
