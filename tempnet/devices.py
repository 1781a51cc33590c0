"""Where the weights of a base model are: on one device, or spread over several (`device_map` of Transformers).

accelerate gives every part of a spread model a hook, which moves the inputs of the part to its device. A weight that is
kept in another memory ("offloaded" to that of the CPU or to a file) is brought there for the call only. Between calls it is
on the device meta, without data, so that neither its values nor its device may be read from the parameter itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

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
    """Return the device of the input embeddings.

    There tokens are best given, and logits come back to where the tokens were, so that a TempNet belongs there too. The
    hidden states and the output weight of a model that is spread may be elsewhere.
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
