"""Where the weights of a base model are, on one device or spread over several (`device_map` of Transformers), and in what
precision: that of PyTorch, or eight bits by torchao.

accelerate gives every part of a spread model a hook, which moves the inputs of the part to its device. A weight that is
"offloaded" to the memory of the CPU or to a file is brought there for the call only. Between calls it is on the device meta,
without data, so that neither its values nor its device may be read from the parameter itself.

With `int8` and `fp8` the weights of linear layers are held in eight bits, with a scale for every row, and are converted to
bfloat16 for each product. Embeddings and the output layer stay in bfloat16, so that logits and a folded TempNet are computed
from the same weight. Such a model can be read and can be the frozen base of a TempNet, but its weights cannot be trained.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

DeviceMap = str | Mapping[str, str | int] | None
"""How to spread a model: "auto" or another name that Transformers knows, name of a part → device, or None: not at all."""


def is_spread(model: nn.Module) -> bool:
    """Return whether accelerate runs the parts of a model on devices of their own."""
    return hasattr(model, "_hf_hook")


def move_base(base: Any, device: str | torch.device) -> Any:
    """Return a base model on a device; one that is spread stays where it is."""
    return base if is_spread(base) else base.to(device)


def run_device(part: nn.Module) -> torch.device:
    """Return the device that a module of a model runs on, wherever its weights are between calls."""
    device = getattr(getattr(part, "_hf_hook", None), "execution_device", None)
    return next(part.parameters()).device if device is None else torch.device(device)


def input_device(base: Any) -> torch.device:
    """Return the device of the input embeddings, where tokens are best given.

    Logits come back to where the tokens were, so that a TempNet belongs there too. The hidden states and the output weight
    of a spread model may be elsewhere.
    """
    return run_device(base.get_input_embeddings())


def with_weights(part: nn.Module) -> AbstractContextManager[None]:
    """Return a context within which the parameters of a module, without those of its parts, have data."""
    if not is_spread(part):
        return nullcontext()
    from accelerate.utils import align_module_device  # whoever has a spread model has accelerate, which is optional

    context: AbstractContextManager[None] = align_module_device(part)
    return context


def offloaded_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield name and value of every parameter of a spread model that is without data between calls, one at a time."""
    for prefix, part in model.named_modules():
        if is_spread(part) and any(parameter.is_meta for parameter in part.parameters(recurse=False)):
            with with_weights(part):
                for name, parameter in part.named_parameters(recurse=False):
                    yield f"{prefix}.{name}", parameter


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

    DeepSpeed moves parameters between workers in a way that torchao's tensors do not support.
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
    """Raise ValueError if a model was loaded in eight bits but has no such weights; GPT-2's layers are not linear ones."""
    # A model that somebody else has quantised otherwise is loaded as it is.
    wanted = getattr(getattr(model, "config", None), "quantization_config", None)
    if getattr(wanted, "quant_method", None) == "torchao" and not any(
        is_traceable_wrapper_subclass(parameter) for parameter in model.parameters()
    ):
        raise ValueError(
            f"{source} is a {type(model).__name__}, which has no linear layers that could be held in eight bits: load it in "
            "bfloat16"
        )
