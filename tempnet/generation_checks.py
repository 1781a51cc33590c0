"""Reject calls of Transformers' `generate()` in which a TempNet would have no effect or a wrong one, before they start.

Also the one rule for which tokens end a text.

Shapes: B sequences, T tokens of the longest prompt.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation import GenerationMode


def end_ids(base: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens after which a text of a model ends, ascending.

    A model may know several, and say so in several places: the tokenizer's end of text, those of the generation
    configuration (chat models list the end of a turn there) and those of the configuration. What a configuration alone
    names counts only if it is one of the tokenizer's added tokens: its default is a number that may be any word. A model
    that separates documents by the token that begins them ends a text by it, so that token ends a text, too.
    """
    ends, added = _as_set(tokenizer.eos_token_id), set(tokenizer.added_tokens_decoder)
    generation = base.generation_config
    if generation is not None and not generation._from_model_config:
        ends |= _as_set(generation.eos_token_id)
    named = (
        _as_set(tokenizer.bos_token_id)
        | _as_set(base.config.get_text_config().eos_token_id)
        | _as_set(getattr(base.config, "eos_token_id", None))
    )
    if generation is not None:
        named |= _as_set(generation.eos_token_id)
    return sorted(token for token in ends | (named & added) if 0 <= token < len(tokenizer))


def _as_set(ids: int | list[int] | None) -> set[int]:
    return set() if ids is None else {ids} if isinstance(ids, int) else set(ids)


def check_generation(config: GenerationConfig, assistant_model: PreTrainedModel | None = None) -> None:
    """Reject settings of `generate()` under which a TempNet would have no effect or a wrong one.

    Raises:
        ValueError: if a setting is unsuitable; the message names the setting, its value and what to do.
    """
    if not config.do_sample:
        raise ValueError(
            f"do_sample = {config.do_sample}: greedy decoding takes the largest logit whatever τ is, so a TempNet would "
            "change nothing. Set do_sample=True, or leave the TempNet out"
        )
    if config.temperature not in (None, 1.0):
        raise ValueError(
            f"temperature = {config.temperature:g} would divide the logits a second time, after the TempNet. "
            "Set temperature=1.0; to sharpen or soften all temperatures, set tau_max_eval of the TempNet"
        )
    if (mode := config.get_generation_mode(assistant_model)) != GenerationMode.SAMPLE:
        raise ValueError(
            f"generation mode {mode.value!r}: its scores are not the logits of one step of one sequence, which is what τ is "
            "predicted for. Use plain sampling: one beam, no assistant model, no prompt lookup"
        )
    if config.guidance_scale not in (None, 1.0):
        raise ValueError(
            f"guidance_scale = {config.guidance_scale:g} mixes the logits of two contexts, and a TempNet predicts τ for one. "
            "Set guidance_scale=1.0"
        )


def check_prompts(
    base: PreTrainedModel, input_ids: Tensor | None, attention_mask: Tensor | None, num_new: int | None
) -> None:
    """Reject prompts that are empty or padded on the right, or that do not fit into the context with the tokens to generate.

    Args:
        base: the model; `max_position_embeddings` of its configuration is its context, if it has this field.
        input_ids: (B, T) tokens; None if the caller gives something else, such as embeddings.
        attention_mask: (B, T) 1 for tokens and 0 for padding; None if nothing is padding.
        num_new: maximum number of new tokens; None to check the prompts alone.

    Raises:
        ValueError: the message names the prompt by its place in the batch, or the lengths.
    """
    if input_ids is None:
        return
    length, generation = input_ids.shape[-1], base.generation_config
    pad = None if generation is None else generation.pad_token_id
    # Transformers takes these for padding, too, unless the token also ends a text.
    if attention_mask is None and pad is not None and pad not in _as_set(generation.eos_token_id):
        attention_mask = (input_ids != pad).long()
    empty = [0] if length == 0 else []
    if attention_mask is not None and attention_mask.ndim == 2:
        empty = (attention_mask.sum(-1) == 0).nonzero().flatten().tolist()
    if empty:
        raise ValueError(
            f"prompt {empty[0]} of {len(input_ids)} is empty: τ is predicted from the logits after a token. "
            "Give every prompt at least one, such as the token that begins a document"
        )
    if attention_mask is not None and attention_mask.ndim == 2 and bool((attention_mask[:, -1] == 0).any()):
        row = int((attention_mask[:, -1] == 0).nonzero()[0, 0])
        raise ValueError(
            f"prompt {row} of {len(input_ids)} is padded on the right: the next token would follow padding. Pad on "
            'the left, with tokenizer.padding_side = "left"'
        )
    context = getattr(base.config.get_text_config(), "max_position_embeddings", None)
    if context and length + (num_new or 0) > context:
        new = f" and max_new_tokens = {num_new}" if num_new else ""
        raise ValueError(f"the longest prompt of {length} tokens{new} do not fit into the context of {context} tokens")


def check_call(base: PreTrainedModel, inputs: Tensor | None, options: dict[str, Any]) -> None:
    """Check a call `base.generate(inputs, **options)` in the form in which `generate()` will see it.

    Raises:
        ValueError: see :func:`check_generation` and :func:`check_prompts`.
    """
    options = dict(options)
    config: GenerationConfig = copy.deepcopy(options.pop("generation_config", None) or base.generation_config)
    config.update(**base.generation_config.to_dict(), defaults_only=True, allow_custom_entries=True)
    rest = config.update(**options)
    check_generation(config, rest.get("assistant_model"))
    tokens = rest.get("input_ids") if inputs is None else inputs
    check_prompts(base, tokens, rest.get("attention_mask"), config.max_new_tokens)
