"""Builds text encoders with a head: loads a pretrained one, or creates a randomly initialised RoBERTa of given sizes."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

from jobs.engine.config import EncoderSection
from pipelines.local_copy import checked_copy
from tempnet.weights import check_weight_files, load_fitting


def build_encoder(
    settings: EncoderSection,
    head: Any,
    *,
    what: str,
    tokenizer: PreTrainedTokenizerFast,
    tokenizer_name: str,
    num_tokens: int,
    seed: int,
    with_checkpointing: bool,
    **options: Any,
) -> PreTrainedModel:
    """Build an encoder with its head, with the same weights on every rank."""
    torch.manual_seed(seed)
    if settings.path:
        model = _load_encoder(settings, head, what, **options)
    else:
        model = head.from_config(
            _random_config(settings, tokenizer, num_tokens, **options), attn_implementation=settings.attention
        )
    if with_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    check_vocabulary(model, tokenizer, tokenizer_name, what="encoder")
    return model


def _load_encoder(settings: EncoderSection, head: Any, what: str, **options: Any) -> PreTrainedModel:
    place = checked_copy(settings.path, "model.path = ")
    check_weight_files(place)
    try:
        model: PreTrainedModel = load_fitting(
            head, place, may_replace_head=True, dtype=torch.float32, use_safetensors=True,
            attn_implementation=settings.attention, **options,
        )  # fmt: skip
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"model.path = {settings.path!r} holds no {what}: {reason}") from error
    return model


def _random_config(
    settings: EncoderSection, tokenizer: PreTrainedTokenizerFast, num_tokens: int, **options: Any
) -> PretrainedConfig:
    """Return the configuration of a RoBERTa of the given sizes for rows of `num_tokens` tokens."""
    return AutoConfig.for_model(
        "roberta",
        vocab_size=len(tokenizer),
        hidden_size=settings.hidden_size,
        intermediate_size=4 * settings.hidden_size,
        num_hidden_layers=settings.num_layers,
        num_attention_heads=settings.num_heads,
        hidden_dropout_prob=settings.dropout,
        attention_probs_dropout_prob=settings.dropout,
        # RoBERTa numbers positions from the padding token's id + 1.
        max_position_embeddings=num_tokens + int(tokenizer.pad_token_id) + 1,
        type_vocab_size=1,
        pad_token_id=tokenizer.pad_token_id,
        **options,
    )


def check_vocabulary(
    encoder: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, tokenizer_name: str, *, what: str
) -> None:
    """Raise ValueError if the tokenizer has more tokens than the encoder has embeddings; `what` names the encoder."""
    num_embeddings = next(encoder.get_input_embeddings().parameters()).shape[0]
    if len(tokenizer) > num_embeddings:
        raise ValueError(
            f"data.tokenizer = {tokenizer_name!r} has {len(tokenizer)} tokens, more than the {num_embeddings} "
            f"embeddings of the {what}: use the encoder's own tokenizer"
        )
