"""Builds the module to train: the two towers, and the loss with its temperatures and per-sample state."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from jobs.engine.encoders import check_vocabulary
from jobs.tasks.dual_encoder.config import ClipConfig
from pipelines.local_copy import checked_copy
from tempnet.contrastive.losses import ContrastiveLoss
from tempnet.contrastive.state import SampleState, World
from tempnet.models.dual_encoder import DualEncoder, read_sizes
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
    encoder = _load_whole(config) if config.model.path else _join_towers(config, tokenizer)
    encoder.text_encoder.set_attn_implementation(config.model.text_attention)
    check_vocabulary(encoder.text_encoder, tokenizer, config.tokenizer, what="text encoder")
    return encoder


def _autocast_dtype(config: ClipConfig) -> torch.dtype | None:
    return torch.bfloat16 if config.workers.resolved_precision == "bf16" else None


def _load_whole(config: ClipConfig) -> DualEncoder:
    """Return the dual encoder at `model.path`, whose sizes must be those of the configuration."""
    encoder_sizes(config)
    place = checked_copy(config.model.path, "model.path = ")
    return DualEncoder.from_pretrained(place, autocast_dtype=_autocast_dtype(config))


def encoder_sizes(config: ClipConfig) -> DualEncoderConfig:
    """Return the sizes of the dual encoder at `model.path`, without loading its weights.

    Raises:
        ValueError: if there is none, or its sizes are not those that the configuration gives.
    """
    settings = config.model
    sizes = read_sizes(checked_copy(settings.path, "model.path = "))
    for field, wanted, found in (
        ("model.image_size", settings.image_size, sizes.image_size),
        ("model.embedding_size", settings.embedding_size, sizes.embedding_size),
        ("data.num_text_tokens", config.data.num_text_tokens, sizes.num_text_tokens),
    ):
        if wanted != found:
            raise ValueError(f"{field} = {wanted}, but model.path = {settings.path!r} was made for {found}")
    return sizes


def _join_towers(config: ClipConfig, tokenizer: PreTrainedTokenizerFast) -> DualEncoder:
    """Return a dual encoder with new projections on two towers, each of which is pretrained or random."""
    sizes = DualEncoderConfig(
        embedding_size=config.model.embedding_size,
        image_size=config.model.image_size,
        num_text_tokens=config.data.num_text_tokens,
    )
    image_tower, text_tower = _image_tower(config), _text_tower(config, tokenizer)
    return DualEncoder(image_tower, text_tower, sizes, autocast_dtype=_autocast_dtype(config))


def _image_tower(config: ClipConfig) -> PreTrainedModel:
    settings = config.model
    if settings.image_path:
        return load_tower(checked_copy(settings.image_path, "model.image_path = "), "image")
    return random_tower(
        "resnet",
        "image",
        embedding_size=settings.image_stem_width,
        hidden_sizes=list(settings.image_widths),
        depths=list(settings.image_depths),
        layer_type=settings.image_block,
    )


def _text_tower(config: ClipConfig, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    settings = config.model
    if settings.text_path:
        return load_tower(checked_copy(settings.text_path, "model.text_path = "), "text")
    return random_tower(
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


def build_tempnets(config: ClipConfig) -> tuple[TempNet | None, TempNet | None]:
    """Return a new TempNet for images and one for texts, or None for both if the loss uses no TempNets."""
    if not config.temperature.needs_tempnets:
        return None, None
    network = config.temperature.network_config(config.model.embedding_size)
    return TempNet(network), TempNet(network)


def build_model(
    config: ClipConfig, tokenizer: PreTrainedTokenizerFast, *, num_pairs: int, device: torch.device
) -> TemperatureDualEncoder:
    """Build the module to train, with the loss's state of `num_pairs` samples partitioned among the ranks.

    With stored embeddings it has no towers.
    """
    encoder = None if config.model.features else build_encoder(config, tokenizer)
    return add_loss(encoder, config, num_pairs=num_pairs, device=device)


def add_loss(
    encoder: DualEncoder | None, config: ClipConfig, *, num_pairs: int, device: torch.device
) -> TemperatureDualEncoder:
    """Build the module from its encoder: add the loss with its TempNets, and its state of `num_pairs` samples."""
    if config.model.freeze:
        # The initial weights of TempNets on frozen towers must not depend on whether the towers were built, which draws
        # random numbers.
        torch.manual_seed(config.run.seed)
    image_tempnet, text_tempnet = build_tempnets(config)
    loss, world = config.temperature.loss_config, World.current()
    state = SampleState(num_pairs, loss.state_columns, world=world, device=device) if loss.state_columns else None
    module = TemperatureDualEncoder(
        encoder,
        ContrastiveLoss(loss, image_tempnet=image_tempnet, text_tempnet=text_tempnet, state=state, world=world),
        freeze_encoder=config.model.freeze,
    )
    return module.to(device)
