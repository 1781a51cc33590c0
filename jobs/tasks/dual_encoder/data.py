"""The data of a dual encoder: images and captions, the frozen towers and their stored embeddings."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from jobs.tasks.base import autocast_dtype, cache_bytes, check_continues, check_resources, check_vocabulary, load_stored
from jobs.tasks.dual_encoder.config import ClipConfig
from pipelines.features import PairEmbeddings, features_directory
from pipelines.images.manifest import ImageManifest
from pipelines.images.pairs import PairSource
from pipelines.images.prepare import PrepareImagesConfig, describe, prepare_images
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


def preparation(config: ClipConfig, split: str) -> PrepareImagesConfig:
    """Return the configuration of the data preparation for `train` or `validation`."""
    data = config.data
    return PrepareImagesConfig(
        source=getattr(data, split),
        captions=getattr(data, f"{split}_captions"),
        splits=getattr(data, f"{split}_splits"),
        max_bad_share=data.max_bad_share,
        key_dot=data.key_dot,
    )


def prepare_split(config: ClipConfig, split: str) -> ImageManifest:
    """Return the manifest of `train` or `validation`, preparing the data unless this was done before.

    The prepared data are kept in the directory of prepared data, which runs share.
    """
    started = time.monotonic()
    check_resources(config.data)
    manifest = prepare_images(
        preparation(config, split),
        config.run.prepared_directory,
        max_bad_share_field="data.max_bad_share",
        resources=config.data.resources,
    )
    print(f"{split:<12} {describe(manifest, time.monotonic() - started)}", flush=True)
    cache_for(config, manifest, split)
    return manifest


def cache_for(config: ClipConfig, manifest: ImageManifest, split: str = "") -> int:
    """Return the size of the node's cache for a split; one that is too small is reported if the split is named."""
    is_remote = "://" in manifest.source and not manifest.source.startswith("file:")
    plan = manifest.plan(seed=config.run.seed, window_size=config.data.shuffle_window)
    shard_bytes = [shard.num_bytes if is_remote else 0 for shard in manifest.shards]
    return cache_bytes(config.data, plan=plan, shard_bytes=shard_bytes, split=split)


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


def random_pairs(num_pairs: int, count: int, seed: int) -> np.ndarray:
    """Draw the sorted IDs of `count` distinct pairs, the same on every rank."""
    return np.sort(np.random.default_rng([seed, num_pairs]).choice(num_pairs, size=count, replace=False))


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
        image_tower, text_tower = _image_tower(config), _text_tower(config, tokenizer)
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
