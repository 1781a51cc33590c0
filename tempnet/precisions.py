"""The precisions that a language model can be loaded in to be read: those of PyTorch, and weights in eight bits by torchao.

With `int8` and `fp8` the weights of linear layers are held in eight bits, with a scale for every row, and are converted to
bfloat16 for each product (weight-only quantisation). Embeddings and the output layer stay in bfloat16, so that logits and a
folded TempNet are computed from the same weight. Such a model cannot be trained here: DeepSpeed sends all parameters from
one worker to the others, which torchao's tensors do not support.
"""

from __future__ import annotations

from typing import Any

import torch

EIGHT_BITS = ("int8", "fp8")
"""Precisions that need torchao, the extra `quantised`."""

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def loading_options(precision: torch.dtype | str) -> dict[str, Any]:
    """Return the options of `from_pretrained` that load a model in a precision.

    Args:
        precision: a dtype, its name, fp32, bf16, int8 or fp8.

    Raises:
        ValueError: if it is unknown, or torchao is needed and is not installed.
    """
    if precision not in EIGHT_BITS:
        dtype = _DTYPES.get(precision, getattr(torch, precision, None)) if isinstance(precision, str) else precision
        if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ValueError(
                f"precision = {precision!r} is neither a floating-point dtype of PyTorch nor one of {', '.join(EIGHT_BITS)}"
            )
        return {"dtype": dtype}
    from transformers import TorchAoConfig

    try:
        from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig
    except ImportError as error:
        raise ValueError(
            f"precision = {precision} needs torchao, which is not installed: pip install 'torchao>=0.18'"
        ) from error
    kind = Int8WeightOnlyConfig if precision == "int8" else Float8WeightOnlyConfig
    return {"dtype": torch.bfloat16, "quantization_config": TorchAoConfig(kind())}
