"""Text encoders with a head: loaded, or made at random as a RoBERTa of given sizes."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerFast

from jobs.engine.config import EncoderSection
from pipelines.sources import check_source
from tempnet.weights import check_weight_files


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
    replaces_head: bool = False,
    **options: Any,
) -> PreTrainedModel:
    """An encoder with its head, the same on every rank.

    Args:
        head: one of Transformers' `AutoModelFor…`.
        what: what a path should hold, for messages.
        tokenizer_name: as the person gave it.
        num_tokens: of the longest row, special tokens included.
        replaces_head: a head of other sizes is replaced by a fresh one.
        options: for the head, such as its labels.

    Raises:
        ValueError: naming the field, if there is none, or it is too small for the tokenizer.
    """
    torch.manual_seed(seed)
    if settings.path:
        try:
            check_source(settings.path)
        except ValueError as error:
            raise ValueError(f"model.path = {error}") from error
        check_weight_files(settings.path)
        try:
            model: PreTrainedModel = head.from_pretrained(
                settings.path,
                dtype=torch.float32,
                use_safetensors=True,
                attn_implementation=settings.attention,
                ignore_mismatched_sizes=replaces_head,
                **options,
            )
        except (OSError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            raise ValueError(f"model.path = {settings.path!r} holds no {what}: {reason}") from error
    else:
        model = head.from_config(
            AutoConfig.for_model(
                "roberta",
                vocab_size=len(tokenizer),
                hidden_size=settings.hidden_size,
                intermediate_size=4 * settings.hidden_size,
                num_hidden_layers=settings.num_layers,
                num_attention_heads=settings.num_heads,
                hidden_dropout_prob=settings.dropout,
                attention_probs_dropout_prob=settings.dropout,
                # RoBERTa's positions start after the padding's own.
                max_position_embeddings=num_tokens + int(tokenizer.pad_token_id) + 1,
                type_vocab_size=1,
                pad_token_id=tokenizer.pad_token_id,
                **options,
            ),
            attn_implementation=settings.attention,
        )
    if with_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    num_embeddings = next(model.get_input_embeddings().parameters()).shape[0]
    if len(tokenizer) > num_embeddings:
        raise ValueError(
            f"data.tokenizer = {tokenizer_name!r} has {len(tokenizer)} tokens, more than the {num_embeddings} of the "
            "encoder: use the encoder's own tokenizer"
        )
    return model
