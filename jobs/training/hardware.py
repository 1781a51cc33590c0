"""What a run asks of the machine: memory for its state, FLOPs a token, and the share of the peak that it uses."""

from __future__ import annotations

import torch

from jobs.training.config import LanguageModelConfig
from tempnet.models.causal_lm import TemperatureCausalLM

# Dense bf16 FLOP/s without sparsity, from the vendors' data sheets; a device is recognised by a part of its name.
PEAK_FLOPS_PER_SECOND = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12, "MI300X": 1307e12}


def state_bytes_per_worker(num_trained: int, num_frozen: int, config: LanguageModelConfig) -> float:
    """Bytes that a worker holds for weights, gradients and AdamW; activations and logits come on top.

    A trained parameter has 4 bytes of weight, 4 of gradient and 12 for the optimizer (two moments, and ZeRO's own copy of
    the weight); ZeRO 1 divides the last among the workers, 2 the gradients too, 3 the weights too.
    """
    workers = config.workers
    share = [1.0 if workers.zero_stage < stage else 1.0 / workers.num_workers for stage in (1, 2, 3)]
    optimizer = 0.0 if workers.offload_optimizer else (12 if workers.zero_stage else 8) * share[0]
    frozen = (2 if workers.precision == "bf16" else 4) * share[2]
    return num_trained * (optimizer + 4 * share[1] + 4 * share[2]) + num_frozen * frozen


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


def peak_flops_per_second(device: torch.device) -> float | None:
    """The device's peak in bf16, or None where it is not known (a CPU, an unlisted GPU)."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_FLOPS_PER_SECOND.items() if part in name), None)
