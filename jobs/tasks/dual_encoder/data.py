"""The data of a dual encoder: images and captions, the frozen towers and their stored embeddings."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from jobs.tasks.base import autocast_dtype, check_continues, check_vocabulary, load_stored
from jobs.tasks.dual_encoder.config import ClipConfig
from jobs.tasks.images import build_image_tower, cache_for
from pipelines.features import PairEmbeddings, features_directory
from pipelines.images.manifest import ImageManifest
from pipelines.images.pairs import PairSource
from pipelines.local_copy import checked_copy
from pipelines.text.tokenization import load_tokenizer, tokenizer_digest
from tempnet.base_model import BaseReference
from tempnet.contrastive.losses import ContrastiveLoss
from tempnet.contrastive.normalisers import NormaliserNet
from tempnet.contrastive.state import SampleState, World
from tempnet.models.dual_encoder import DualEncoder, TemperatureDualEncoder, encoder_digest, read_sizes
from tempnet.models.dual_encoder_config import DualEncoderConfig
from tempnet.models.towers import load_tower, random_tower
from tempnet.network import TempNet


def pair_source(config: ClipConfig, manifest: ImageManifest) -> PairSource:
    """Return the source that reads views of images, and tokens, from prepared data."""
    return PairSource(
        manifest=manifest,
        tokenizer=load_tokenizer(config.tokenizer, needs_eos=False),
        image_size=config.model.image_size,
        num_text_tokens=config.data.num_text_tokens,
        seed=config.run.seed,
        augmentation=config.data.augmentation,
        caption_noise=config.data.caption_noise,
        cache_bytes=cache_for(config, manifest),
    )


def refer_to_towers(config: ClipConfig) -> BaseReference:
    """Return the reference to the frozen towers of a run."""
    path = config.model.path
    found = BaseReference(path=path, digest=encoder_digest(checked_copy(path, "model.path = ")))
    return check_continues(config, path, found)


def caption_noise(config: ClipConfig, split: str) -> float:
    """Return the share of the captions of train or validation that have noise: validation has none."""
    return config.data.caption_noise if split == "train" else 0.0


def embeddings_of(config: ClipConfig, pairs: ImageManifest, towers: BaseReference, split: str) -> PairEmbeddings:
    """Return where the towers' embeddings of the pairs of train or validation are, or will be, in the run's precision."""
    noise = caption_noise(config, split)
    directory = features_directory(
        config.run.prepared_directory,
        pairs,
        kind="pairs",
        encoder=towers.digest,
        precision=config.workers.resolved_precision,
        tokenizer=tokenizer_digest(load_tokenizer(config.tokenizer, needs_eos=False)),
        num_text_tokens=config.data.num_text_tokens,
        **({"caption_noise": [noise, config.run.seed]} if noise else {}),
    )
    sizes = encoder_sizes(config)
    return PairEmbeddings(
        directory=directory,
        pairs=pairs,
        embedding_size=sizes.embedding_size,
        image_size=sizes.image_size,
        num_text_tokens=sizes.num_text_tokens,
    )


def find_embeddings(config: ClipConfig, pairs: ImageManifest, towers: BaseReference, split: str) -> PairEmbeddings:
    """Return the stored embeddings of the pairs of train or validation."""
    what = f"the embeddings of data.{split} for these towers, captions and precision are not stored"
    return load_stored(embeddings_of(config, pairs, towers, split), pairs, what=what, job="jobs.train_clip")


def build_encoder(config: ClipConfig, tokenizer: PreTrainedTokenizerFast) -> DualEncoder:
    """Build the dual encoder, the same on every rank: loaded as a whole, or from pretrained or random towers."""
    settings = config.model
    torch.manual_seed(config.run.seed)
    if settings.path:
        encoder_sizes(config)
        place = checked_copy(settings.path, "model.path = ")
        encoder = DualEncoder.from_pretrained(place, autocast_dtype=autocast_dtype(config))
    else:
        sizes = DualEncoderConfig(
            embedding_size=settings.embedding_size,
            image_size=settings.image_size,
            num_text_tokens=config.data.num_text_tokens,
        )
        image_tower = build_image_tower(settings, settings.image_path, "model.image_path")
        text_tower = _text_tower(config, tokenizer)
        encoder = DualEncoder(image_tower, text_tower, sizes, autocast_dtype=autocast_dtype(config))
    encoder.text_encoder.set_attn_implementation(settings.text_attention)
    check_vocabulary(encoder.text_encoder, tokenizer, config.tokenizer, what="text encoder")
    return encoder


def encoder_sizes(config: ClipConfig) -> DualEncoderConfig:
    """Return the sizes of the dual encoder at `model.path`, without loading its weights."""
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


def build_networks(config: ClipConfig) -> dict[str, Any]:
    """Return the new networks of the loss for images and for texts, by the names that `ContrastiveLoss` has for them."""
    temperature, size = config.temperature, config.model.embedding_size
    networks: dict[str, Any] = {}
    if temperature.needs_tempnets:
        tempnet = temperature.network_config(size)
        networks = {name: TempNet(tempnet) for name in ("image_tempnet", "text_tempnet")}
    for name in ("image_normaliser", "text_normaliser"):
        networks[name] = NormaliserNet.for_loss(temperature.loss_config, size, temperature.num_prototypes)
    return networks


def add_loss(
    encoder: DualEncoder | None, config: ClipConfig, *, num_pairs: int, device: torch.device
) -> TemperatureDualEncoder:
    """Build the module from its encoder, None with stored embeddings: add the loss with its networks and its state.

    The state of `num_pairs` samples is partitioned among the ranks.
    """
    if config.model.freeze:
        # The initial weights of TempNets on frozen towers must not depend on whether the towers were built, which draws
        # random numbers.
        torch.manual_seed(config.run.seed)
    networks = build_networks(config)
    loss, world = config.temperature.loss_config, World.current()
    state = SampleState(num_pairs, loss.state_columns, world=world, device=device) if loss.state_columns else None
    module = TemperatureDualEncoder(
        encoder,
        ContrastiveLoss(loss, **networks, state=state, world=world),
        freeze_encoder=config.model.freeze,
    )
    return module.to(device)
