"""FLOPs of training on a token, from which the share of the device's peak that training uses is computed."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from torch import Tensor

from jobs.engine.task import whole_shape
from jobs.tasks.language_model.config import LanguageModelConfig
from tempnet.devices import constant_weights
from tempnet.models.causal_lm import TemperatureCausalLM
from tempnet.models.output_head import StoredBase


def flops_per_token(module: TemperatureCausalLM, config: LanguageModelConfig) -> float:
    """Return the FLOPs that training on one token mathematically needs; recomputed activations do not count.

    Every parameter of a matrix product takes 2 FLOPs in the forward and 4 in the backward pass, and attention takes
    12·layers·width·T for a context of T tokens (PaLM, arXiv 2204.02311, Appendix B). A frozen base model has only the
    forward pass, a third of this; of one whose hidden states are stored only the output layer is run. TempNet takes 4
    FLOPs per parameter: its input has no gradient, and nearly all its parameters are in its first layer.
    """
    base = module.base
    num_tempnet = _count(module.tempnet.parameters()) if module.tempnet else 0
    if isinstance(base, StoredBase):
        return 2 * _count([base.output.weight]) + 4 * num_tempnet
    text = base.config.get_text_config()
    position = getattr(text, "max_position_embeddings", 0) * text.hidden_size
    num_base = _count(chain(base.parameters(), constant_weights(base)))
    embedding = next(base.get_input_embeddings().parameters())
    num_lookup = 0 if base.config.tie_word_embeddings else _count([embedding])
    num_multiplying = num_base - num_lookup - (position if base.config.model_type == "gpt2" else 0)
    attention = 12 * text.num_hidden_layers * text.hidden_size * config.data.context_length
    whole = 6 * num_multiplying + attention
    return (whole / 3 if module.freeze_base else whole) + 4 * num_tempnet


def _count(parameters: Iterable[Tensor]) -> int:
    return sum(whole_shape(parameter).numel() for parameter in parameters)
