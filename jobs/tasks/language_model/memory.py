"""The memory that training a language model takes, from its shapes alone (`jobs.engine.description`)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.func import functional_call
from transformers import PreTrainedModel

from jobs.engine.description import training_memory
from jobs.tasks.language_model.config import LanguageModelConfig
from tempnet.devices import bytes_saved
from tempnet.models.causal_lm import NUM_PROFILED_LOGITS
from tempnet.models.packing import document_mask
from tempnet.softmax.linear import NUM_LOGITS_PER_CHUNK


def estimate_memory(
    config: LanguageModelConfig,
    base: PreTrainedModel,
    vocab_size: int,
    num_base: int,
    num_tempnet: int,
    num_teacher: int = 0,
) -> dict[str, float]:
    """Return item → bytes for a worker, from the base on the device meta and the numbers of parameters that it holds."""
    model, workers, is_frozen = config.model, config.workers, config.model.is_frozen
    text, sizes = base.config.get_text_config(), (config.micro_batch_size, config.data.context_length)
    num_layers, hidden = text.num_hidden_layers, 4.0 * sizes[0] * sizes[1] * text.hidden_size
    is_half = workers.resolved_precision == "bf16"
    activations = hidden if model.features else saved_bytes(base, *sizes, is_half=is_half)
    if not model.features and (is_frozen or workers.activation_checkpointing):
        activations = activations / num_layers + (0 if is_frozen else num_layers * hidden)
    # Four buffers of a chunk's logits, and hidden states with gradients; the output weight's gradient and copy in bfloat16.
    chunk = min(sizes[0] * sizes[1], max(1, NUM_LOGITS_PER_CHUNK // vocab_size)) * vocab_size
    bytes_per_weight = (0 if is_frozen else 4) + (2 if is_half else 0)
    if model.precision and not model.features:
        num_base -= bytes_saved(base) // 2  # eight bits, in the place of bfloat16
    return training_memory(
        workers,
        num_trained=num_tempnet + (0 if is_frozen else num_base),
        num_frozen=num_base if is_frozen else num_teacher,
        accumulates=config.num_accumulation_steps > 1,
        activations=activations,
        loss=16.0 * chunk + hidden + bytes_per_weight * vocab_size * text.hidden_size,
        # The last validation computes the profiles of some tokens at a time, from five copies of their logits.
        validation=20.0 * min(sizes[0] * sizes[1] * vocab_size, NUM_PROFILED_LOGITS),
    )


def saved_bytes(base: PreTrainedModel, num_blocks: int, num_tokens: int, *, is_half: bool) -> float:
    """Return the bytes that autograd saves in a forward pass of the base, run without data, apart from its parameters."""
    seen: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:  # so that no other storage gets the same address
        return seen.setdefault(tensor.untyped_storage()._cdata, tensor)

    body, text = base.base_model, base.config.get_text_config()
    with FakeTensorMode(allow_non_fake_inputs=True), torch.autocast("cpu", torch.bfloat16, enabled=is_half):
        values = {
            name: torch.empty(value.shape, dtype=value.dtype, requires_grad=value.requires_grad)
            for name, value in [*body.named_parameters(), *body.named_buffers()]
        }
        places = torch.arange(num_tokens).expand(num_blocks, -1)
        mask = document_mask(places, base.config._attn_implementation)
        inputs = {"input_ids": places, "position_ids": places, "attention_mask": mask, "use_cache": False}
        try:
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                functional_call(body, values, kwargs=inputs)
        except Exception:  # a model of another kind may take no such mask: arXiv 2205.05198, §4.1, in float32
            return 4.0 * 34 * places.numel() * text.hidden_size * text.num_hidden_layers
        parameters = {value.untyped_storage()._cdata for value in values.values()}
    return float(sum(tensor.untyped_storage().nbytes() for key, tensor in seen.items() if key not in parameters))
