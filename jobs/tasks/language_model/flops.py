"""FLOPs of a trained token, for the share of the device's peak that training uses."""

from __future__ import annotations

from jobs.tasks.language_model.config import LanguageModelConfig
from tempnet.models.causal_lm import TemperatureCausalLM


def flops_per_token(module: TemperatureCausalLM, config: LanguageModelConfig) -> float:
    """FLOPs that the mathematics of one trained token needs (recomputation does not count).

    Per multiplying parameter 2 in the forward and 4 in the backward pass, and 12·layers·width·T for attention (PaLM,
    arXiv 2204.02311, Appendix B); a frozen base has only the forward third. TempNet's input has no gradient: 4 a
    parameter of its first layer, which is nearly all of it.
    """
    base = module.base
    position = getattr(base.config, "max_position_embeddings", 0) * base.config.hidden_size
    num_base = sum(parameter.numel() for parameter in base.parameters())
    embedding = next(base.get_input_embeddings().parameters())
    num_lookup = 0 if base.config.tie_word_embeddings else embedding.numel()
    num_multiplying = num_base - num_lookup - (position if base.config.model_type == "gpt2" else 0)
    attention = 12 * base.config.num_hidden_layers * base.config.hidden_size * config.data.context_length
    whole = 6 * num_multiplying + attention
    num_tempnet = sum(parameter.numel() for parameter in module.tempnet.parameters()) if module.tempnet else 0
    return (whole / 3 if module.freeze_base else whole) + 4 * num_tempnet
