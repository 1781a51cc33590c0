"""Prepares images for training, and builds the encoder of images."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TypeAlias

from transformers import PreTrainedModel

from jobs.tasks.base import cache_bytes, check_resources
from jobs.tasks.config import ImageTowerSection
from pipelines.images.manifest import ImageManifest
from pipelines.images.prepare import PrepareImagesConfig, describe, prepare_images
from pipelines.local_copy import checked_copy
from tempnet.models.towers import load_tower, random_tower

if TYPE_CHECKING:
    from jobs.tasks.dual_encoder.config import ClipConfig
    from jobs.tasks.image_encoder.config import ImageEncoderConfig

ImageConfig: TypeAlias = "ClipConfig | ImageEncoderConfig"


def preparation(config: ImageConfig, split: str) -> PrepareImagesConfig:
    """Return the configuration of the data preparation for `train` or `validation`."""
    data = config.data
    return PrepareImagesConfig(
        source=getattr(data, split),
        captions=getattr(data, f"{split}_captions", ""),
        splits=getattr(data, f"{split}_splits", ()),
        label=getattr(data, "label", ""),
        max_bad_share=data.max_bad_share,
        key_dot=data.key_dot,
    )


def prepare_split(config: ImageConfig, split: str) -> ImageManifest:
    """Return the manifest of `train` or `validation`, preparing the data unless this was done before."""
    started = time.monotonic()
    check_resources(config.data, config.run.max_wait_minutes)
    manifest = prepare_images(
        preparation(config, split),
        config.run.prepared_directory,
        max_bad_share_field="data.max_bad_share",
        resources=config.data.resources,
    )
    print(f"{split:<12} {describe(manifest, time.monotonic() - started)}", flush=True)
    cache_for(config, manifest, split)
    return manifest


def cache_for(config: ImageConfig, manifest: ImageManifest, split: str = "") -> int:
    """Return the size of the node's cache for a split; one that is too small is reported if the split is named."""
    is_remote = "://" in manifest.source and not manifest.source.startswith("file:")
    plan = manifest.plan(seed=config.run.seed, window_size=config.data.shuffle_window)
    shard_bytes = [shard.num_bytes if is_remote else 0 for shard in manifest.shards]
    return cache_bytes(config.data, plan=plan, shard_bytes=shard_bytes, split=split)


def build_image_tower(settings: ImageTowerSection, path: str, field: str) -> PreTrainedModel:
    """Load the vision model at a path, which `field` names, or build a random ResNet if the path is empty."""
    if path:
        return load_tower(checked_copy(path, f"{field} = "), "image")
    widths, depths = list(settings.image_widths), list(settings.image_depths)
    sizes = {"embedding_size": settings.image_stem_width, "hidden_sizes": widths, "depths": depths}
    return random_tower("resnet", "image", **sizes, layer_type=settings.image_block)
