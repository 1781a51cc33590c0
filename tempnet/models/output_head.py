"""From the last hidden state of a Transformers causal LM to its logits: L = cap(scale·(W h + b)).

Models differ in the bias, the scale and the cap. The formula is read off the configuration and then checked against the model
itself, once; a model that computes its logits some other way is found out and takes the path of materialised logits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

# Tokens of the check (one alone may be padding, whose logits are 0); they may differ by rounding of the model's dtype.
_NUM_PROBES = 8
_MAX_RELATIVE_ERROR = {torch.float32: 1e-4, torch.float64: 1e-6}
_MAX_RELATIVE_ERROR_HALF = 2e-2


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputHead:
    """The formula of a model's logits; the weight stays with the model."""

    scale: float
    """What multiplies W h + b (Cohere's `logit_scale`, Granite's 1/`logits_scaling`)."""
    soft_cap: float | None
    """Gemma's `final_logit_softcapping`."""

    def logits(self, base: PreTrainedModel, hidden: Tensor, vocab_size: int) -> Tensor:
        """(…, d) hidden states → (…, V) logits, in the dtype of the weight."""
        weight, bias = output_weight(base)
        hidden = self.scaled(hidden).to(weight.dtype)
        logits = F.linear(hidden, weight[:vocab_size], None if bias is None else self.scale * bias[:vocab_size])
        return logits if self.soft_cap is None else self.soft_cap * torch.tanh(logits / self.soft_cap)

    def is_product(self, base: PreTrainedModel) -> bool:
        """Whether the logits are W h and nothing else, so that TempNet's first layer folds into the weight."""
        return self.scale == 1.0 and self.soft_cap is None and output_weight(base)[1] is None

    def scaled(self, hidden: Tensor) -> Tensor:
        """The hidden states with the scale in them."""
        return hidden if self.scale == 1.0 else hidden * self.scale


def output_weight(base: PreTrainedModel) -> tuple[Tensor, Tensor | None]:
    """W (V or more, d) and b, or None. Read as attributes: under ZeRO-3 that makes DeepSpeed gather them."""
    head = base.get_output_embeddings()
    return head.weight, getattr(head, "bias", None)


@torch.no_grad()
def find_output_head(base: PreTrainedModel) -> OutputHead | None:
    """The formula of a model's logits, checked on a few tokens; None if the model does not follow it."""
    config = base.config.get_text_config()
    scale = getattr(config, "logit_scale", None) or 1.0 / (getattr(config, "logits_scaling", None) or 1.0)
    head = OutputHead(scale=float(scale), soft_cap=getattr(config, "final_logit_softcapping", None))
    was_training = base.training
    base.eval()
    ids = torch.arange(_NUM_PROBES, device=base.device).unsqueeze(0) % config.vocab_size
    output = base(input_ids=ids, use_cache=False)
    hidden = base.base_model(input_ids=ids, use_cache=False)[0]
    base.train(was_training)
    if hidden.shape[-1] != base.get_output_embeddings().weight.shape[-1]:
        return None
    ours = head.logits(base, hidden, output.logits.shape[-1])
    error = (ours.float() - output.logits.float()).norm() / output.logits.float().norm().clamp(min=1e-12)
    return head if error < _MAX_RELATIVE_ERROR.get(hidden.dtype, _MAX_RELATIVE_ERROR_HALF) else None
