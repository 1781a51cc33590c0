"""Prepares and reads the images and captions on which a dual encoder is trained."""

from __future__ import annotations

import time

import numpy as np

from jobs.tasks.dual_encoder.config import ClipConfig
from jobs.tasks.node_cache import cache_bytes
from pipelines.images.manifest import ImageManifest
from pipelines.images.pairs import PairSource
from pipelines.images.prepare import PrepareImagesConfig, describe, prepare_images
from pipelines.text.tokenization import load_tokenizer


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
    if config.data.resources:  # a run in this process does without Ray, whose import takes seconds
        from jobs.engine.cluster import check_placement

        check_placement("data.reader_resources", config.data.resources)
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
    return cache_bytes(
        config.data,
        plan=manifest.plan(seed=config.run.seed, window_size=config.data.shuffle_window),
        shard_bytes=[shard.num_bytes if is_remote else 0 for shard in manifest.shards],
        split=split,
    )


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
