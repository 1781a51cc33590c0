"""What remains of a base model whose last hidden states are stored: its output layer, from which the logits follow.

Shapes: V effective vocabulary, d hidden size.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from tempnet.models.output_head import OutputHead, output_weight

HEAD_FILE = "head.safetensors"
"""Name of the file that holds the output layer."""


class StoredBase(nn.Module):
    """Output layer of a base model, in the place of the model where hidden states are read instead of computed.

    Args:
        weight: (V or more, d) output weight.
        bias: output bias, or None.
        head: formula of the logits.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, head: OutputHead) -> None:
        super().__init__()
        self.output = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
        self.output.weight = nn.Parameter(weight, requires_grad=False)
        if bias is not None:
            self.output.bias = nn.Parameter(bias, requires_grad=False)
        self.head = head

    def get_output_embeddings(self) -> nn.Linear:
        """Return the output layer, under the name that Transformers gives to this method."""
        return self.output

    @classmethod
    def load(cls, file: Path) -> StoredBase:
        """Read the file that :func:`save_head` wrote.

        Raises:
            ValueError: if the file is damaged.
        """
        try:
            with safe_open(file, framework="pt") as stored:
                names = set(stored.keys())
                bias = stored.get_tensor("bias") if "bias" in names else None
                head = OutputHead(**json.loads(stored.metadata()["head"]))
                return cls(stored.get_tensor("weight"), bias, head)
        except Exception as error:  # A damaged file can raise almost any exception, depending on its bytes.
            raise ValueError(f"{file} holds no output layer: {error!r:.200}; prepare the features again") from error


def save_head(base: PreTrainedModel, head: OutputHead, vocab_size: int, file: Path) -> None:
    """Write the output layer of a model, without the padding of its vocabulary, to a file."""
    weight, bias = output_weight(base)
    tensors = {"weight": weight.detach()[:vocab_size].cpu().contiguous()}
    if bias is not None:
        tensors["bias"] = bias.detach()[:vocab_size].cpu().contiguous()
    save_file(tensors, file, metadata={"head": json.dumps({"scale": head.scale, "soft_cap": head.soft_cap})})


def to_bfloat16(values: torch.Tensor) -> Tensor:
    """Return the bfloat16 numbers whose bits are given as int16, as NumPy and Arrow hold them."""
    return values.view(torch.bfloat16)
