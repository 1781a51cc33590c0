"""Preparing and reading the image–text data of a contrastive run."""

from __future__ import annotations

import time

import numpy as np
from pipelines.images.manifest import ImageManifest
from pipelines.images.pairs import PairSource
from pipelines.images.prepare import PrepareImagesConfig, describe, prepare_images
from pipelines.text.tokenization import load_tokenizer

from jobs.tasks.dual_encoder.config import ClipConfig


def preparation(config: ClipConfig, split: str) -> PrepareImagesConfig:
    """What to prepare for `train` or `validation`."""
    data = config.data
    return PrepareImagesConfig(
        source=getattr(data, split),
        captions=getattr(data, f"{split}_captions"),
        splits=getattr(data, f"{split}_splits"),
        max_bad_share=data.max_bad_share,
    )


def prepared(config: ClipConfig, split: str) -> ImageManifest:
    """The manifest of a split, prepared beside the runs unless it is there already; needs Ray."""
    started = time.monotonic()
    manifest = prepare_images(preparation(config, split), config.run.prepared_directory)
    print(f"{split:<12} {describe(manifest, time.monotonic() - started)}", flush=True)
    return manifest


def pair_source(config: ClipConfig, manifest: ImageManifest) -> PairSource:
    """Views and tokens of a prepared data set."""
    return PairSource(
        manifest=manifest,
        tokenizer=load_tokenizer(config.tokenizer, needs_eos=False),
        image_size=config.model.image_size,
        num_text_tokens=config.data.num_text_tokens,
        seed=config.run.seed,
        augmentation=config.data.augmentation,
        caption_noise=config.data.caption_noise,
    )


def random_pairs(num_pairs: int, count: int, seed: int) -> np.ndarray:
    """Ids of `count` different pairs, the same on every rank."""
    return np.sort(np.random.default_rng([seed, num_pairs]).choice(num_pairs, size=count, replace=False))
