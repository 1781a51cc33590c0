"""Output head of a Transformers causal LM, from its last hidden state h to its logits: L = cap(scale·(W h + b)).

The formula is derived from the configuration and then checked once against the model itself. A model that computes its
logits in another way is detected, and its loss is computed from materialised logits. :class:`StoredBase` is the output layer
alone, for stored hidden states.

Shapes: V effective vocabulary, d hidden size.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from tempnet.devices import input_device, is_spread, with_weights
from tempnet.models.packing import small_model

# Number of tokens in the check (more than one, because a single one may be padding, whose logits are 0), and the
# relative error that is accepted, which allows for rounding in the model's dtype.
_NUM_PROBES = 8
_MAX_RELATIVE_ERROR = {torch.float32: 1e-4, torch.float64: 1e-6}
_MAX_RELATIVE_ERROR_HALF = 2e-2


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputHead:
    """Formula of a model's logits; it does not contain the weight, which is read from the model."""

    scale: float
    """Factor of W h + b (Cohere's `logit_scale`, Granite's 1/`logits_scaling`)."""
    soft_cap: float | None
    """Logits become soft_cap·tanh(logits/soft_cap) (Gemma's `final_logit_softcapping`); None for no cap."""

    def logits(self, base: Any, hidden: Tensor, vocab_size: int) -> Tensor:
        """Return logits (…, V) of hidden states (…, d), in the dtype of the weight; those beyond V are not computed.

        Weight and bias are those of `base`, a model or a :class:`StoredBase`.
        """
        weight, bias = output_weight(base)
        hidden = self.scaled(hidden).to(weight)
        logits = F.linear(hidden, weight[:vocab_size], None if bias is None else self.scale * bias[:vocab_size])
        return logits if self.soft_cap is None else self.soft_cap * torch.tanh(logits / self.soft_cap)

    def is_product(self, base: PreTrainedModel) -> bool:
        """Return whether the logits are exactly W h, so that TempNet's first layer can be folded into the weight."""
        return self.scale == 1.0 and self.soft_cap is None and output_weight(base)[1] is None

    def scaled(self, hidden: Tensor) -> Tensor:
        """Return the hidden states multiplied by the scale."""
        return hidden if self.scale == 1.0 else hidden * self.scale


def output_scale(base: Any) -> float:
    """Return the factor of W h + b, which TempNets read h times, in training as elsewhere."""
    config = base.config.get_text_config()
    return float(getattr(config, "logit_scale", None) or 1.0 / (getattr(config, "logits_scaling", None) or 1.0))


def output_weight(base: Any) -> tuple[Tensor, Tensor | None]:
    """Return the output weight W (V or more, d) and the bias b, or None.

    They are read as attributes of their module, because under ZeRO-3 this makes DeepSpeed gather them. Those that are
    offloaded are copied to the device that the layer runs on.
    """
    head = base.get_output_embeddings()
    with with_weights(head):
        return head.weight, getattr(head, "bias", None)


@torch.no_grad()
def find_output_head(base: PreTrainedModel) -> OutputHead | None:
    """Return the formula of a model's logits, checked on a few tokens, or None if the model does not follow it.

    A model without weights (on the device meta) is checked by a small one of the same kind.
    """
    if not is_spread(base) and any(parameter.is_meta for parameter in base.parameters()):
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.default_generator.manual_seed(0)
            base = small_model(base)
    config = base.config.get_text_config()
    head = OutputHead(scale=output_scale(base), soft_cap=getattr(config, "final_logit_softcapping", None))
    was_training = base.training
    base.eval()
    ids = torch.arange(_NUM_PROBES, device=input_device(base)).unsqueeze(0) % config.vocab_size
    output = base(input_ids=ids, use_cache=False)
    hidden = base.base_model(input_ids=ids, use_cache=False)[0]
    base.train(was_training)
    if hidden.shape[-1] != base.get_output_embeddings().weight.shape[-1]:
        return None
    ours = head.logits(base, hidden, output.logits.shape[-1])
    theirs = output.logits.to(ours.device).float()
    error = (ours.float() - theirs).norm() / theirs.norm().clamp(min=1e-12)
    return head if error < _MAX_RELATIVE_ERROR.get(hidden.dtype, _MAX_RELATIVE_ERROR_HALF) else None


HEAD_FILE = "head.safetensors"
"""Name of the file that holds the output layer."""


class StoredBase(nn.Module):
    """Output layer of a base model, in the place of the model where hidden states are read instead of computed.

    It has the output weight (V or more, d), a bias or None, and the formula of the logits.
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
        """Read the file that :func:`save_head` wrote; a damaged one raises ValueError."""
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
