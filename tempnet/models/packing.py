"""How a causal language model keeps packed documents apart: tried on a small model of its kind.

Transformers has two ways, and no model says which is right for it. A 4-D mask reaches every layer as it is: it serves any
plain attention, but sliding windows and chunks are lost. Without a mask most models derive one for every kind of layer
from positions that restart at 0, but some ignore the positions. Recurrent layers and ALiBi may know neither. A wrong way is
silent: the model is then another one than the one that generates. So both are compared with the documents apart.
"""

from __future__ import annotations

import copy
import re

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

# Documents of more tokens than the window.
_LENGTHS, _WINDOW, _VOCABULARY, _NUM_HEADS = (7, 9), 4, 64, 2
# What integers of a configuration become at most. Depth, the pattern of layers and the width of a head stay: what is
# tied to them (rotary factors, lists by layer) stays right, and no kind of layer is lost.
_LIMITS = {
    r"^vocab_size": _VOCABULARY,
    r"(window|window_size|chunk_size|^local_attention)$": _WINDOW,
    r"intermediate|inner|ffn": 32,
    r"experts": 16,
}
_MAX_NUM_PARAMETERS = 200_000_000
# Of the largest logit: far above rounding in float32, far below a leak or a lost window.
_TOLERANCE = 1e-3


def takes_document_mask(model: PreTrainedModel) -> bool:
    """Whether the model must be given a :func:`document_mask`, or none. It is not run and may be on the meta device.

    Raises:
        ValueError: if packed documents are not computed as apart in either way.
    """
    reason = ""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
        torch.default_generator.manual_seed(0)
        try:
            small = _small_model(model)
            ids = torch.randint(1, _VOCABULARY, (1, sum(_LENGTHS)))
            apart = torch.cat([small(input_ids=part, use_cache=False).logits for part in ids.split(_LENGTHS, 1)], 1)
            later = ids[:, : _LENGTHS[0]].clone()
            later[:, -1] = later[:, -1] % (_VOCABULARY - 1) + 1
            sees = small(input_ids=later, use_cache=False).logits[:, :-1] - apart[:, : _LENGTHS[0] - 1]
        except Exception as error:  # whatever the model's own code raises
            reason = f" (no small one could be tried: {type(error).__name__}: {error})"
        else:
            if sees.abs().max() > _TOLERANCE * apart.abs().max():
                raise ValueError(
                    f"a model of type {model.config.model_type!r} sees later tokens: it is no causal language model"
                )
            positions = torch.cat([torch.arange(length) for length in _LENGTHS]).unsqueeze(0)
            for takes_mask in (True, False):
                mask = document_mask(positions, small.config._attn_implementation) if takes_mask else None
                try:
                    packed = small(input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=False).logits
                except Exception:  # it knows no such mask, or no positions
                    continue
                if (packed - apart).abs().max() <= _TOLERANCE * apart.abs().max():
                    return takes_mask
    raise ValueError(
        f"packed documents cannot be kept apart in a model of type {model.config.model_type!r}{reason}: "
        "set data.attend_across_documents = True"
    )


def document_mask(position_ids: Tensor, attention: str = "sdpa") -> Tensor:
    """(B, T) positions that restart at 0 with every document → (B, 1, T, T) mask: causal, and inside one document.

    Boolean, but 0 and the lowest number for eager attention, which adds it to the scores.
    """
    document = (position_ids == 0).cumsum(-1)
    same = document.unsqueeze(-1) == document.unsqueeze(-2)
    num_tokens = position_ids.shape[-1]
    causal = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=position_ids.device).tril()
    mask = (same & causal).unsqueeze(1)
    if attention == "eager":
        return torch.zeros(mask.shape, device=mask.device).masked_fill(~mask, torch.finfo(torch.float32).min)
    return mask


def _small_model(model: PreTrainedModel) -> PreTrainedModel:
    """Of the same class and depth, in eval mode; weights at random and large enough that every layer counts."""
    config = _small_config(model.config)
    with torch.device("meta"):
        num_parameters = sum(parameter.numel() for parameter in type(model)(config).parameters())
    if num_parameters > _MAX_NUM_PARAMETERS:
        raise ValueError(f"it would have {num_parameters:,} parameters")
    small = type(model)(config).eval()
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
    # Where the width of a head is given, that of the model is free.
    small.hidden_size = 64 if vars(config).get("head_dim") else config.hidden_size // num_heads * _NUM_HEADS
    small.num_attention_heads = _NUM_HEADS
    return small
