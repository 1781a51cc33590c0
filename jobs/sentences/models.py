"""Building the module that is trained: an encoder with its MLM head, the loss with its temperature and state."""

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForMaskedLM, PreTrainedModel, PreTrainedTokenizerFast

from jobs.sentences.config import SentenceConfig
from pipelines.tokenization import SpecialTokens
from tempnet.contrastive.state import SampleState
from tempnet.contrastive.unimodal import UnimodalLoss
from tempnet.contrastive.world import World
from tempnet.models.sentence_encoder import num_positions
from tempnet.models.temperature_sentence_encoder import TemperatureSentenceEncoder
from tempnet.network import TempNet


def build_encoder(config: SentenceConfig, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """The encoder with its MLM head: loaded, or at random from the seed; the same on every rank.

    Raises:
        ValueError: if there is none, or it is too small for the tokenizer or the spans.
    """
    torch.manual_seed(config.run.seed)
    settings = config.model
    special = SpecialTokens.of(tokenizer)
    width = config.data.max_length + special.num_added
    if settings.path:
        try:
            model: PreTrainedModel = AutoModelForMaskedLM.from_pretrained(
                settings.path, dtype=torch.float32, use_safetensors=True, attn_implementation=settings.attention
            )
        except (OSError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            raise ValueError(f"model.path = {settings.path!r} holds no encoder with an MLM head: {reason}") from error
    else:
        model = AutoModelForMaskedLM.from_config(
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
                max_position_embeddings=width + special.pad_id + 1,
                type_vocab_size=1,
                pad_token_id=special.pad_id,
            ),
            attn_implementation=settings.attention,
        )
    if config.workers.activation_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    num_embeddings = next(model.get_input_embeddings().parameters()).shape[0]
    if len(tokenizer) > num_embeddings:
        raise ValueError(
            f"data.tokenizer = {config.tokenizer!r} has {len(tokenizer)} tokens, more than the {num_embeddings} of the "
            "encoder: use the encoder's own tokenizer"
        )
    most = num_positions(model.config)
    if most is not None and width > most:
        raise ValueError(
            f"data.max_length = {config.data.max_length} with {special.num_added} special tokens is more than the "
            f"{most} positions of the encoder: choose at most {most - special.num_added}"
        )
    return model


def build_tempnet(config: SentenceConfig, width: int) -> TempNet | None:
    """A fresh TempNet where the loss reads one."""
    if not (config.is_contrastive and config.temperature.needs_tempnets):
        return None
    return TempNet(config.temperature.network_config(width))


def build_model(
    config: SentenceConfig, tokenizer: PreTrainedTokenizerFast, *, num_documents: int, device: torch.device
) -> TemperatureSentenceEncoder:
    """The module that is trained, with the state of `num_documents` documents divided among the ranks."""
    encoder = build_encoder(config, tokenizer)
    tempnet, world = build_tempnet(config, int(encoder.config.hidden_size)), World.current()
    loss = None
    if config.is_contrastive:
        settings = config.temperature.loss_config
        columns = settings.state_columns
        state = SampleState(num_documents, columns, world=world, device=device) if columns else None
        loss = UnimodalLoss(settings, tempnet=tempnet, state=state, world=world)
    module = TemperatureSentenceEncoder(
        encoder,
        loss,
        contrastive_weight=config.objective.contrastive_weight,
        mlm_weight=config.objective.mlm_weight,
        world=world,
        autocast_dtype=torch.bfloat16 if config.workers.precision == "bf16" else None,
    )
    return module.to(device)
