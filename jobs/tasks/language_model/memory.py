"""The memory that training a language model takes, from its shapes alone."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import chain

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.func import functional_call
from transformers import PreTrainedModel

from jobs.engine.cuda_autocast import CudaAutocastRules
from jobs.engine.memory import Memory, training_memory
from jobs.tasks.language_model.config import LanguageModelConfig
from jobs.tasks.language_model.validation import MAX_LOGITS_KEPT
from tempnet.models.packing import document_mask
from tempnet.precisions import bytes_saved, linear_weights
from tempnet.softmax.planning import NUM_LOGITS_PER_CHUNK

# Numbers per token, layer and unit of the hidden size that a transformer saves, apart from its attention scores
# (Korthikanti et al., arXiv 2205.05198, §4.1). Used for models whose forward pass cannot be counted.
_NUMBERS_PER_LAYER = 34
# Logits that the last validation keeps for the comparison with the TempNet's rivals, and what is computed of them at once.
_COPIES_OF_KEPT_LOGITS = 8


def estimate_memory(
    config: LanguageModelConfig,
    base: PreTrainedModel,
    *,
    num_base: int,
    num_tempnet: int,
    num_teacher: int = 0,
    vocab_size: int,
) -> Memory:
    """Return the memory of a worker at its peak.

    Args:
        config: configuration of the run.
        base: the base model on the device meta.
        num_base: number of parameters of the base that a worker holds.
        num_tempnet: number of parameters of the TempNet.
        num_teacher: number of parameters of the model to learn from, which every worker holds whole; 0 without one.
        vocab_size: V, the effective vocabulary.
    """
    model = config.model
    num_tokens = config.micro_batch_size * config.data.context_length
    hidden_size = base.config.get_text_config().hidden_size
    is_frozen = model.is_frozen
    bytes_per_value = 2 if config.workers.resolved_precision == "bf16" else 4
    activations = 2.0 * num_tokens * hidden_size if model.features else activation_bytes(config, base)
    # Two buffers of a chunk's logits, those of a softmax at τ = 1 for statistics, and hidden states with gradients.
    chunk = min(num_tokens, max(1, NUM_LOGITS_PER_CHUNK // vocab_size)) * vocab_size
    loss = 4.0 * 4 * chunk + 4.0 * num_tokens * hidden_size
    if not is_frozen:
        loss += 4.0 * vocab_size * hidden_size  # gradient of the output weight
    if bytes_per_value == 2:
        loss += 2.0 * vocab_size * hidden_size  # the output weight in the dtype of the products
    num_kept = min(config.validation.num_oracle_tokens, MAX_LOGITS_KEPT // vocab_size)
    return training_memory(
        config.workers,
        num_trained=num_tempnet + (0 if is_frozen else num_base),
        num_frozen=num_base if is_frozen else num_teacher,
        saved=saved_by_eight_bits(base) if model.precision and not model.features else 0.0,
        activations=activations,
        loss=loss,
        validation=4.0 * _COPIES_OF_KEPT_LOGITS * num_kept * vocab_size,
        accumulates=config.num_accumulation_steps > 1,
    )


def saved_by_eight_bits(base: PreTrainedModel) -> float:
    """Return the bytes that weights in eight bits save; the largest one is converted to bfloat16 for its product."""
    return float(bytes_saved(base) - 2 * max(weight.numel() for weight in linear_weights(base)))


def activation_bytes(config: LanguageModelConfig, base: PreTrainedModel) -> float:
    """Return the bytes that the base holds for a micro-batch between its forward and its backward pass.

    The forward pass is run with tensors that have shapes but no data, and what autograd would save is counted. With
    activation checkpointing it is the input of every layer, and everything within one layer. Under autocast, the copies
    of trained weights in bfloat16 stay until the backward pass, too, and are counted; what autocast leaves in float32
    depends on the device. A frozen base, whose weights are in bfloat16 then, saves nothing; one layer is counted.
    """
    is_half = config.workers.resolved_precision == "bf16"
    sizes = config.micro_batch_size, config.data.context_length
    saved = _saved_bytes(
        base, *sizes, is_half=is_half, is_frozen=config.model.is_frozen, use_gpu=config.workers.use_gpu
    )
    num_layers = max(1, base.config.get_text_config().num_hidden_layers)
    if config.model.is_frozen:
        return saved / num_layers
    if config.workers.activation_checkpointing:
        hidden = 4.0 * sizes[0] * sizes[1] * base.config.get_text_config().hidden_size
        return num_layers * hidden + saved / num_layers
    return saved


def _saved_bytes(
    base: PreTrainedModel,
    num_blocks: int,
    num_tokens: int,
    *,
    is_half: bool = False,
    is_frozen: bool = False,
    use_gpu: bool = False,
) -> float:
    """Return the bytes of all tensors that autograd saves in a forward pass of the body, without the parameters.

    Args:
        base: the model on the device meta.
        num_blocks: number of blocks.
        num_tokens: number of tokens of each.
        is_half: whether matrix products are in bfloat16 by autocast, which is not applied on the device meta. Therefore the
            tensors are ones of the CPU without data.
        is_frozen: whether the parameters are in bfloat16 then.
        use_gpu: whether autocast has the rules of a CUDA device.
    """
    seen: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if (storage := tensor.untyped_storage()._cdata) not in parameters:
            seen[storage] = tensor  # kept, so that no other storage gets the same address
        return tensor

    def like(value: Tensor) -> Tensor:
        dtype = torch.bfloat16 if is_half and is_frozen and value.is_floating_point() else value.dtype
        return torch.empty(value.shape, dtype=dtype, device="cpu", requires_grad=value.requires_grad)

    body: nn.Module = base.base_model
    rules = CudaAutocastRules() if is_half and use_gpu else nullcontext()
    with FakeTensorMode(allow_non_fake_inputs=True), torch.autocast("cpu", torch.bfloat16, enabled=is_half), rules:
        values = {name: like(value) for name, value in chain(body.named_parameters(), body.named_buffers())}
        parameters = {value.untyped_storage()._cdata for value in values.values()}
        positions = torch.arange(num_tokens).expand(num_blocks, -1)
        inputs = {
            "input_ids": torch.zeros(num_blocks, num_tokens, dtype=torch.long),
            "position_ids": positions,
            # Packed documents are trained with such a mask; without one, the model would look at positions without data.
            "attention_mask": document_mask(positions, base.config._attn_implementation),
            "use_cache": False,
        }
        try:
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                functional_call(body, values, kwargs=inputs)
        except Exception:  # A model of another kind may need values, or take no such mask; it can raise anything.
            config = base.config.get_text_config()
            return float(
                _NUMBERS_PER_LAYER * 4 * num_blocks * num_tokens * config.hidden_size * config.num_hidden_layers
            )
    return float(sum(tensor.untyped_storage().nbytes() for tensor in seen.values()))
