"""Loads a pretrained model under ZeRO 3 so that no process ever holds more than its part and one whole weight.

The model is built on the device meta. Then rank 0 reads one weight after the other; DeepSpeed sends it to all ranks, which
keep their part of it and drop the rest. Every byte is read once, by one process, and the values are those of the file.

No module is built within `deepspeed.zero.Init` as a context. It divides the parameters of every part as soon as the part is
made, so that values which are written into them later are written into nothing: Transformers' initial weights, and those of
a TempNet's layers (measured: a GPT-2's first loss was 44.1 instead of 6.2).
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import deepspeed
import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from tempnet.weights import WeightFiles


def base_without_weights(place: str | Path, *, trust_remote_code: bool = False, **options: Any) -> PreTrainedModel:
    """Return a base model whose parameters are on the device meta; its buffers have the values that they get by loading.

    Args:
        place: local directory of the model.
        trust_remote_code: whether Transformers may run code that comes with the model.
        options: options of `AutoModelForCausalLM.from_config`, such as `dtype`.
    """
    config = AutoConfig.from_pretrained(place, trust_remote_code=trust_remote_code)
    with init_empty_weights(include_buffers=False):
        base: PreTrainedModel = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code, **options)
    base.tie_weights()  # every parameter was replaced by one of its own
    with suppress(OSError):
        base.generation_config = GenerationConfig.from_pretrained(place)
    return base.eval()


def load_partitioned(
    model: PreTrainedModel, files: WeightFiles, deepspeed_config: dict[str, Any], *, rank: int
) -> None:
    """Give the parameters of a model on the device meta the values of files, divided among all ranks.

    All ranks must call it. The parameters keep whether they are trained, and their dtype.

    Args:
        model: the model; afterwards its parameters are those of DeepSpeed's ZeRO 3.
        files: the weights.
        deepspeed_config: the configuration with which DeepSpeed is started later.
        rank: rank of this process.

    Raises:
        ValueError: on rank 0, if a weight contains NaN; on all ranks, if the files lack a weight.
    """
    # Until DeepSpeed knows the process group, the configuration that `zero.Init` reads takes the world to be one process.
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
    names = files.match(model)
    if names is None:
        raise ValueError(f"{files.directory} lacks weights of the model, or has them in other shapes")
    stored = {id(parameter): names[name] for name, parameter in model.named_parameters()}
    filled: dict[int, nn.Parameter] = {}
    empty = list(model.parameters())  # kept, because the ids of dropped objects may be given to others
    # One place for all whole weights, one after the other: if each had a place of its own, the parts that are kept would
    # lie between those that are freed, and the allocator could give hardly any memory back.
    place = torch.empty(max(value.numel() * value.element_size() for value in empty), dtype=torch.uint8)
    for part in list(model.modules()):
        for name, parameter in list(part._parameters.items()):
            if parameter is None or id(parameter) not in stored:
                continue
            if id(parameter) not in filled:
                whole = _whole(parameter, place)
                if rank == 0:
                    files.read_into(stored[id(parameter)], whole)
                filled[id(parameter)] = _divide(parameter, whole, deepspeed_config)
            part.register_parameter(name, filled[id(parameter)])
    del empty
    for name, buffer in model.named_buffers():
        if name in files.files:
            buffer.copy_(files.read(name))


def _whole(parameter: nn.Parameter, place: Tensor) -> Tensor:
    """Return a tensor with the shape and dtype of a parameter at the beginning of a place of bytes."""
    size = parameter.numel() * parameter.element_size()
    return place[:size].view(parameter.dtype).view(parameter.shape)


def _divide(parameter: nn.Parameter, whole: Tensor, deepspeed_config: dict[str, Any]) -> nn.Parameter:
    """Return a parameter of ZeRO 3 with the value of rank 0; `whole` is free again afterwards."""
    holder = nn.Module()
    holder.weight = nn.Parameter(whole, requires_grad=parameter.requires_grad)
    deepspeed.zero.Init(module=holder, config_dict_or_path=deepspeed_config)
    divided: nn.Parameter = holder.weight
    return divided
