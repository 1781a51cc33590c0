"""How the Triton kernels are launched: tile sizes, the layout of their inputs, and the devices that can run them.

Triton is imported on first use, so that this file can be imported where Triton is not installed.

Shapes: N tokens, d hidden size, V effective vocabulary.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Number of row blocks that run at the same time.
_GROUP = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """Block of logits that a program computes at a time; its three sizes are powers of two ≥ 16."""

    num_tokens: int
    """Number of rows (tokens) of the tile."""
    num_vocab: int
    """Number of columns (vocabulary entries) of the tile."""
    num_hidden: int
    """Number of terms of the inner product that are loaded at a time."""
    num_warps: int
    """Number of warps per program."""
    num_stages: int
    """Number of pipeline stages, that is, of loads in flight."""

    @classmethod
    def for_dtype(cls, dtype: torch.dtype) -> Tile:
        """Return sizes for inputs of this dtype.

        The accumulator fits into the registers, and the loads into the shared memory, of GPUs of compute capability ≥
        8.0.
        """
        if dtype == torch.float32:
            return cls(num_tokens=64, num_vocab=64, num_hidden=32, num_warps=4, num_stages=3)
        return cls(num_tokens=128, num_vocab=128, num_hidden=64, num_warps=8, num_stages=3)


def is_available(tensor: Tensor) -> bool:
    """Return whether the kernels accept a tensor: 16- or 32-bit floats, on an NVIDIA GPU of compute capability ≥ 8.0.

    Under Triton's interpreter, tensors on the CPU are accepted too. AMD GPUs have too little shared memory for these
    tiles.
    """
    if tensor.dtype not in _DTYPES or importlib.util.find_spec("triton") is None:
        return False
    if tensor.is_cuda:
        return torch.version.cuda is not None and torch.cuda.get_device_capability(tensor.device) >= (8, 0)
    return tensor.device.type == "cpu" and _is_interpreted()


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelInputs:
    """Input tensors in the layout and dtype that the kernels read."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    soft_cap: float | None
    tau: Tensor

    @classmethod
    def prepare(
        cls, hidden: Tensor, weight: Tensor, bias: Tensor | None, soft_cap: float | None, tau: Tensor
    ) -> KernelInputs:
        """Make all tensors contiguous and τ float32; hidden states and weight must have one dtype."""
        assert hidden.dtype == weight.dtype, f"hidden is {hidden.dtype}, weight {weight.dtype}"
        return cls(
            hidden=hidden.contiguous(),
            weight=weight.contiguous(),
            bias=None if bias is None else bias.contiguous(),
            soft_cap=soft_cap,
            tau=tau.float().contiguous(),
        )


def launch_options(tile: Tile, hidden: Tensor) -> dict[str, Any]:
    """Return the compile-time arguments that both kernels share."""
    return {
        "GROUP": _GROUP,
        "BLOCK_TOKENS": tile.num_tokens,
        "BLOCK_VOCAB": tile.num_vocab,
        "BLOCK_HIDDEN": tile.num_hidden,
        "PRECISION": "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee",
        # The interpreter multiplies bfloat16 values as if they were integers (triton-lang/triton#11584).
        "WIDEN": _is_interpreted() and hidden.dtype != torch.float32,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
        "enable_fp_fusion": True,  # This is the default of Triton 3.9; Triton 3.10 will turn it off.
    }


def _is_interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"
