"""Builds the module to train: an encoder with its MLM head, and the loss with its temperatures and per-document state."""

from __future__ import annotations

import torch
from transformers import AutoModelForMaskedLM, PreTrainedModel, PreTrainedTokenizerFast

from jobs.engine import encoders
from jobs.tasks.sentence_encoder.config import SentenceConfig
from pipelines.text.tokenization import SpecialTokens
from tempnet.contrastive.state import SampleState, World
from tempnet.contrastive.unimodal import UnimodalLoss
from tempnet.models.sentence_encoder import num_positions
from tempnet.models.temperature_sentence_encoder import TemperatureSentenceEncoder
from tempnet.network import TempNet

MIN_POSITIONS = 128
"""Positions of a new encoder, also where it is trained on shorter spans: what is longer would be cut when it is used."""


def build_encoder(config: SentenceConfig, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """Build the encoder with its MLM head, pretrained or randomly initialised, the same on every rank.

    Raises:
        ValueError: if the encoder cannot be loaded, or is too small for the tokenizer or the length of the spans.
    """
    special = SpecialTokens.of(tokenizer)
    width = config.data.max_length + special.num_added
    model = encoders.build_encoder(
        config.model,
        AutoModelForMaskedLM,
        what="encoder with an MLM head",
        tokenizer=tokenizer,
        tokenizer_name=config.tokenizer,
        num_tokens=max(width, MIN_POSITIONS),
        seed=config.run.seed,
        with_checkpointing=config.workers.activation_checkpointing,
    )
    most = num_positions(model.config)
    if most is not None and width > most:
        raise ValueError(
            f"data.max_length = {config.data.max_length} with {special.num_added} special tokens is more than the "
            f"{most} positions of the encoder: choose at most {most - special.num_added}"
        )
    return model


def build_tempnet(config: SentenceConfig, width: int) -> TempNet | None:
    """Return a new TempNet that reads embeddings of the given width, or None if the loss uses no TempNet."""
    if not (config.is_contrastive and config.temperature.needs_tempnets):
        return None
    return TempNet(config.temperature.network_config(width))


def build_model(
    config: SentenceConfig, tokenizer: PreTrainedTokenizerFast, *, num_documents: int | None, device: torch.device
) -> TemperatureSentenceEncoder:
    """Build the module to train, with the loss's state of `num_documents` documents partitioned among the ranks.

    The number may be unknown (None) if the loss keeps no state of documents.
    """
    encoder = build_encoder(config, tokenizer)
    tempnet, world = build_tempnet(config, int(encoder.config.hidden_size)), World.current()
    loss = None
    if config.is_contrastive:
        settings = config.temperature.loss_config
        columns = settings.state_columns
        state = None
        if columns:
            assert num_documents is not None  # `make_plan` refuses the other case.
            state = SampleState(num_documents, columns, world=world, device=device)
        loss = UnimodalLoss(settings, tempnet=tempnet, state=state, world=world)
    module = TemperatureSentenceEncoder(
        encoder,
        loss,
        contrastive_weight=config.objective.contrastive_weight,
        mlm_weight=config.objective.mlm_weight,
        world=world,
        autocast_dtype=torch.bfloat16 if config.workers.resolved_precision == "bf16" else None,
    )
    return module.to(device)
