"""Determine, with a small model of the same kind, how a causal language model keeps packed documents apart.

Transformers has two ways, and a model does not declare which one is right for it. A 4-D mask is passed to every layer
unchanged, which disables sliding windows and chunks. Without a mask, most models derive one for every kind of layer from
positions that restart at 0, but some ignore the positions. Recurrent layers and ALiBi may support neither. The wrong way
raises no error, but the model that is trained then differs from the one that generates. Therefore both ways are compared
with the separate documents.
"""

from __future__ import annotations

import copy
import re
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AttentionInterface,
    AttentionMaskInterface,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.masking_utils import flex_attention_mask

FLEX = "packed_flex"
"""Name of Transformers' FlexAttention for every model that takes its attention from Transformers' interface.

Transformers allows its own name for it, flex_attention, only to the models that declare it, and GPT-2 does not.
"""
AttentionInterface.register(FLEX, flex_attention_forward)
AttentionMaskInterface.register(FLEX, flex_attention_mask)

FLASH = ("flash_attention_2", "flash_attention_3")
"""Transformers' names of FlashAttention, which is given where documents begin instead of a mask."""

# Side of the blocks that FlexAttention skips or computes, in tokens: that of its kernels by default.
_BLOCK = 128

# Sizes of the test: the documents are longer than the attention window.
_LENGTHS, _WINDOW, _VOCABULARY, _NUM_HEADS = (7, 9), 4, 64, 2
# Upper limits for integers in the configuration of the small model, by name. Depth, the pattern of layers and the
# width of a head are kept, so that values that depend on them (rotary factors, lists by layer) stay valid and all
# kinds of layers occur.
_LIMITS = {
    r"^vocab_size": _VOCABULARY,
    r"(window|window_size|chunk_size|^local_attention)$": _WINDOW,
    r"intermediate|inner|ffn": 32,
    r"experts": 16,
}
_MAX_NUM_PARAMETERS = 200_000_000
# Accepted difference relative to the largest logit: far above rounding in float32, and far below the effect of
# attention across documents or of a disabled window.
_TOLERANCE = 1e-3
_HALF_TOLERANCE = 0.05  # in bfloat16


def takes_document_mask(model: PreTrainedModel) -> bool:
    """Return whether the model must be given a :func:`document_mask` (True) or no mask (False); ValueError for neither.

    FlashAttention takes none, but the bounds of the documents (:func:`packed_inputs`), and is tried in bfloat16 on the GPU.
    The model itself is not run, and may be on the meta device. One that is not causal raises ValueError, too.
    """
    reason = ""
    attention = model.config.get_text_config()._attn_implementation
    is_flash = attention in FLASH and torch.cuda.is_available()
    tolerance = _HALF_TOLERANCE if is_flash else _TOLERANCE
    with (
        torch.random.fork_rng(devices=[torch.cuda.current_device()] if is_flash else []),
        torch.device("cuda" if is_flash else "cpu"),
        torch.no_grad(),
        torch.compiler.set_stance("force_eager"),  # FlexAttention would be compiled for the CPU
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # FlexAttention says that it is slow without a compiler
        torch.default_generator.manual_seed(0)
        if is_flash:
            torch.cuda.manual_seed(0)
        try:
            small: Any = small_model(model)
            if is_flash:
                small = small.to("cuda", torch.bfloat16)
            num_ids = min(_VOCABULARY, small.config.vocab_size)
            ids = torch.randint(1, num_ids, (2, sum(_LENGTHS)))
            apart = torch.cat([small(input_ids=part, use_cache=False).logits for part in ids.split(_LENGTHS, 1)], 1)
            later = ids[:, : _LENGTHS[0]].clone()
            later[:, -1] = later[:, -1] % (num_ids - 1) + 1
            sees = small(input_ids=later, use_cache=False).logits[:, :-1] - apart[:, : _LENGTHS[0] - 1]
        except Exception as error:  # The model's own code may raise any exception.
            reason = f" (no small one could be tried: {type(error).__name__}: {error})"
        else:
            if sees.abs().max() > tolerance * apart.abs().max():
                raise ValueError(
                    f"a model of type {model.config.model_type!r} sees later tokens: it is no causal language model"
                )
            positions = torch.cat([torch.arange(length) for length in _LENGTHS]).expand(2, -1)
            for takes_mask in (False,) if attention in FLASH else (True, False):
                inputs = packed_inputs(positions, attention, takes_mask=takes_mask)
                try:
                    packed = small(input_ids=ids, position_ids=positions, use_cache=False, **inputs).logits
                except Exception:  # The model does not support such a mask, or no positions.
                    continue
                if (packed - apart).abs().max() <= tolerance * apart.abs().max():
                    return takes_mask
    raise ValueError(
        f"packed documents cannot be kept apart in a model of type {model.config.model_type!r}{reason}: "
        "set attend_across_documents = True"
    )


def packed_inputs(position_ids: Tensor, attention: str, *, takes_mask: bool) -> dict[str, Any]:
    """Return the arguments, beside tokens and positions (B, T), by which a model keeps packed documents apart.

    For FlashAttention they are the bounds of all documents in the flattened batch (`cu_seqlens`), for whose number the host
    waits once; no document is longer than T. Else it is a :func:`document_mask`, or no mask.
    """
    if attention not in FLASH:
        return {"attention_mask": document_mask(position_ids, attention) if takes_mask else None}
    is_first = position_ids == 0
    is_first[:, 0] = True
    bounds = F.pad(is_first.flatten().nonzero().squeeze(1), (0, 1), value=position_ids.numel()).int()
    lengths = dict.fromkeys(("max_length_q", "max_length_k"), position_ids.shape[1])
    return {"attention_mask": None, "cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, **lengths}


def document_mask(position_ids: Tensor, attention: str = "sdpa") -> Tensor | BlockMask:
    """Return a mask (B, 1, T, T) that allows only causal attention within the same document.

    It is boolean, or for eager attention, which adds the mask to the scores, 0 where attention is allowed and the lowest
    float32 elsewhere. For FlexAttention it is a :func:`block_mask`. Positions (B, T) restart at 0 with every document.
    """
    if attention == FLEX:
        return block_mask(position_ids)
    document = (position_ids == 0).cumsum(-1)
    same = document.unsqueeze(-1) == document.unsqueeze(-2)
    num_tokens = position_ids.shape[-1]
    causal = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=position_ids.device).tril()
    mask = (same & causal).unsqueeze(1)
    if attention == "eager":
        return torch.zeros(mask.shape, device=mask.device).masked_fill(~mask, torch.finfo(torch.float32).min)
    return mask


def block_mask(position_ids: Tensor) -> BlockMask:
    """Return the mask of :func:`document_mask` for FlexAttention, which holds (T/128)² numbers instead of T².

    Documents are contiguous, so that the first and last document of a block of 128 tokens say which blocks of keys a block
    of queries attends to wholly, in part, or not at all. Nothing waits for the device.
    """
    document = (position_ids == 0).cumsum(-1)
    num_tokens = position_ids.shape[-1]
    num_blocks = -(-num_tokens // _BLOCK)
    filler = document[:, -1:].expand(-1, num_blocks * _BLOCK - num_tokens)
    blocks = torch.cat([document, filler], -1).unflatten(-1, (num_blocks, _BLOCK))
    first, last = blocks[..., 0], blocks[..., -1]
    diagonal = torch.eye(num_blocks, dtype=torch.bool, device=document.device)
    # Keys that come earlier share a document with the queries if their last one is the queries' first.
    meets = torch.ones_like(diagonal).tril(-1) & (first.unsqueeze(-1) == last.unsqueeze(-2))
    is_whole = meets & (last.unsqueeze(-1) == first.unsqueeze(-2))

    def allows(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (document[batch, query] == document[batch, key])

    def listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Return the number of chosen blocks of keys of every block of queries, and all blocks, these first."""
        order = chosen.int().sort(dim=-1, descending=True, stable=True).indices
        return chosen.sum(-1, dtype=torch.int32).unsqueeze(1), order.int().unsqueeze(1)

    mask = BlockMask.from_kv_blocks(
        *listed((meets & ~is_whole) | diagonal),
        *listed(is_whole),
        BLOCK_SIZE=_BLOCK,
        mask_mod=allows,
        seq_lengths=(num_tokens, num_tokens),
    )
    mask.ndim = 4  # type: ignore[attr-defined]  # Transformers' GPT-2 asks every mask for it.
    return mask


def small_model(model: PreTrainedModel) -> PreTrainedModel:
    """Return a small model of the same class and depth in eval mode, with weights so large that every layer has an effect.

    One that would have too many parameters raises ValueError.
    """
    config = _small_config(model.config.get_text_config())
    kind: Any = type(model)
    if type(config) is not type(model.config):  # of a composite model, the language model alone
        kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    with torch.device("meta"):
        num_parameters = sum(parameter.numel() for parameter in kind(config).parameters())
    if num_parameters > _MAX_NUM_PARAMETERS:
        raise ValueError(f"it would have {num_parameters:,} parameters")
    small = kind(config).eval()
    for parameter in small.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return small


def _small_config(config: PretrainedConfig) -> PretrainedConfig:
    small = copy.deepcopy(config)
    num_heads = small.num_attention_heads
    for name, value in vars(config).items():
        if not isinstance(value, int) or isinstance(value, bool):
            continue
        if name.endswith("token_id"):
            setattr(small, name, 0)
        elif re.search(r"(key_value|kv)_heads$", name):
            setattr(small, name, _NUM_HEADS if value == num_heads else 1)
        for pattern, limit in _LIMITS.items():
            if re.search(pattern, name):
                setattr(small, name, min(value, limit))
    # If the configuration gives the width of a head, the width of the model can be chosen freely.
    small.hidden_size = 64 if vars(config).get("head_dim") else config.hidden_size // num_heads * _NUM_HEADS
    small.num_attention_heads = _NUM_HEADS
    return small
