"""Compile the transformer blocks of a Transformers model, one graph for all of them."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel


def compile_blocks(model: PreTrainedModel, *, backend: str = "inductor") -> int:
    """Compile every transformer block in place by `torch.compile`, and return their number.

    Names and types of the modules stay the same, so that checkpoints and exports do. The blocks share one graph, because
    TorchDynamo takes the weights of a module as inputs: only the first block of the first step is compiled, once for training
    and once for validation. Losses, embeddings and the output layer are not compiled: the losses have kernels of their own.

    Args:
        model: the model; its blocks are its largest `nn.ModuleList`.
        backend: backend of `torch.compile`.

    Raises:
        ValueError: if the model has no list of blocks.
    """
    lists = [module for module in model.base_model.modules() if isinstance(module, nn.ModuleList) and len(module)]
    if not lists:
        raise ValueError(
            f"a model of type {model.config.model_type!r} has no list of transformer blocks to compile: set "
            "workers.compile = 'off'"
        )
    blocks = max(lists, key=lambda blocks: sum(parameter.numel() for parameter in blocks.parameters()))
    for block in blocks:
        block.compile(dynamic=False, backend=backend)
    return len(blocks)
