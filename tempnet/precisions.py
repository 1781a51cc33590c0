"""The precisions that a language model can be loaded in to be read: those of PyTorch, and weights in eight bits by torchao.

With `int8` and `fp8` the weights of linear layers are held in eight bits, with a scale for every row, and are converted to
bfloat16 for each product (weight-only quantisation). Embeddings and the output layer stay in bfloat16, so that logits and a
folded TempNet are computed from the same weight. Such a model can be read and can be the frozen base of a TempNet, but its
weights cannot be trained.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

EIGHT_BITS = ("int8", "fp8")
"""Precisions that need torchao, the extra `quantised`."""

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def loading_options(precision: torch.dtype | str) -> dict[str, Any]:
    """Return the options of `from_pretrained` that load a model in a precision: a dtype, its name, fp32, bf16, int8 or fp8.

    An unknown one, or one that needs torchao where that is not installed, raises ValueError.
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


def linear_weights(model: Any) -> list[Tensor]:
    """Return the weights of a Transformers model that are held in eight bits: of its linear layers but the output layer."""
    output = model.get_output_embeddings()
    return [part.weight for part in model.modules() if isinstance(part, nn.Linear) and part is not output]


def bytes_saved(model: Any) -> int:
    """Return the bytes by which a model in eight bits is smaller than in bfloat16; a row of a weight has a scale of four."""
    return sum(weight.numel() - 4 * weight.shape[0] for weight in linear_weights(model))


def hold_constant(model: nn.Module) -> None:
    """Make the weights in eight bits of a model that is not trained buffers instead of parameters.

    DeepSpeed sends all parameters from one worker to the others, and moves them in a way that torchao's tensors do not
    support.
    """
    for part in model.modules():
        for name, weight in list(part.named_parameters(recurse=False)):
            if is_traceable_wrapper_subclass(weight):
                delattr(part, name)
                part.register_buffer(name, weight.detach(), persistent=False)


def constant_weights(model: nn.Module) -> Iterator[Tensor]:
    """Yield the weights that :func:`hold_constant` has made buffers."""
    return (buffer for buffer in model.buffers() if is_traceable_wrapper_subclass(buffer))


def check_precision(model: nn.Module, source: object) -> None:
    """Check that a model has weights in eight bits if it was loaded so; GPT-2's layers, for example, are not linear ones.

    Else ValueError is raised, which names the source and the kind of the model.
    """
    # A model that somebody else has quantised otherwise is loaded as it is.
    wanted = getattr(getattr(model, "config", None), "quantization_config", None)
    if getattr(wanted, "quant_method", None) == "torchao" and not any(
        is_traceable_wrapper_subclass(parameter) for parameter in model.parameters()
    ):
        raise ValueError(
            f"{source} is a {type(model).__name__}, which has no linear layers that could be held in eight bits: load it in "
            "bfloat16"
        )
