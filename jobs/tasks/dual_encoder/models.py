"""Builds the module to train: the two towers, and the loss with its temperatures and per-sample state."""

from __future__ import annotations

import torch
from transformers import PreTrainedTokenizerFast

from jobs.tasks.dual_encoder.config import ClipConfig
from pipelines.local_copy import local_copy
from pipelines.sources import check_source
from tempnet.contrastive.losses import ContrastiveLoss
from tempnet.contrastive.state import SampleState
from tempnet.contrastive.world import World
from tempnet.models.dual_encoder import DualEncoder
from tempnet.models.dual_encoder_config import DualEncoderConfig
from tempnet.models.temperature_dual_encoder import TemperatureDualEncoder
from tempnet.models.towers import load_tower, random_tower
from tempnet.network import TempNet


def build_encoder(config: ClipConfig, tokenizer: PreTrainedTokenizerFast) -> DualEncoder:
    """Build the dual encoder, the same on every rank: loaded as a whole, or from pretrained or random towers.

    Raises:
        ValueError: if a tower cannot be loaded, or does not fit the tokenizer, the images or the captions.
    """
    torch.manual_seed(config.run.seed)
    settings = config.model
    autocast = torch.bfloat16 if config.workers.precision == "bf16" else None
    places: dict[str, str] = {}
    for field in ("path", "image_path", "text_path"):
        places[field] = ""
        if source := getattr(settings, field):
            try:
                check_source(place := local_copy(source))
            except ValueError as error:
                raise ValueError(f"model.{field} = {error}") from error
            places[field] = place
    if settings.path:
        encoder = DualEncoder.from_pretrained(places["path"], autocast_dtype=autocast)
        for field, wanted, found in (
            ("model.image_size", settings.image_size, encoder.config.image_size),
            ("model.embedding_size", settings.embedding_size, encoder.config.embedding_size),
            ("data.num_text_tokens", config.data.num_text_tokens, encoder.config.num_text_tokens),
        ):
            if wanted != found:
                raise ValueError(f"{field} = {wanted}, but model.path = {settings.path!r} was made for {found}")
    else:
        image_tower = (
            load_tower(places["image_path"], "image")
            if settings.image_path
            else random_tower(
                "resnet",
                "image",
                embedding_size=settings.image_stem_width,
                hidden_sizes=list(settings.image_widths),
                depths=list(settings.image_depths),
                layer_type=settings.image_block,
            )
        )
        text_tower = (
            load_tower(places["text_path"], "text")
            if settings.text_path
            else random_tower(
                "distilbert",
                "text",
                vocab_size=len(tokenizer),
                dim=settings.text_hidden_size,
                hidden_dim=4 * settings.text_hidden_size,
                n_layers=settings.text_num_layers,
                n_heads=settings.text_num_heads,
                max_position_embeddings=max(512, config.data.num_text_tokens),
                dropout=settings.text_dropout,
                attention_dropout=settings.text_dropout,
                pad_token_id=tokenizer.pad_token_id or 0,
            )
        )
        encoder = DualEncoder(
            image_tower,
            text_tower,
            DualEncoderConfig(
                embedding_size=settings.embedding_size,
                image_size=settings.image_size,
                num_text_tokens=config.data.num_text_tokens,
            ),
            autocast_dtype=autocast,
        )
    encoder.text_encoder.set_attn_implementation(settings.text_attention)
    num_embeddings = next(encoder.text_encoder.get_input_embeddings().parameters()).shape[0]
    if len(tokenizer) > num_embeddings:
        raise ValueError(
            f"data.tokenizer = {config.tokenizer!r} has {len(tokenizer)} tokens, more than the {num_embeddings} of the text "
            "encoder: use the encoder's own tokenizer"
        )
    return encoder


def build_tempnets(config: ClipConfig) -> tuple[TempNet | None, TempNet | None]:
    """Return a new TempNet for images and one for texts, or None for both if the loss uses no TempNets."""
    if not config.temperature.needs_tempnets:
        return None, None
    network = config.temperature.network_config(config.model.embedding_size)
    return TempNet(network), TempNet(network)


def build_model(
    config: ClipConfig, tokenizer: PreTrainedTokenizerFast, *, num_pairs: int, device: torch.device
) -> TemperatureDualEncoder:
    """Build the module to train, with the loss's state of `num_pairs` samples partitioned among the ranks."""
    encoder = build_encoder(config, tokenizer)
    image_tempnet, text_tempnet = build_tempnets(config)
    loss, world = config.temperature.loss_config, World.current()
    state = SampleState(num_pairs, loss.state_columns, world=world, device=device) if loss.state_columns else None
    module = TemperatureDualEncoder(
        encoder,
        ContrastiveLoss(loss, image_tempnet=image_tempnet, text_tempnet=text_tempnet, state=state, world=world),
        freeze_encoder=config.model.freeze,
    )
    return module.to(device)
