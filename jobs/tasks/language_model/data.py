"""Prepares the text on which a language model is trained."""

from __future__ import annotations

import time
from typing import Any

from jobs.tasks.language_model.config import LanguageModelConfig
from jobs.tasks.node_cache import GIB, cache_bytes
from pipelines.text.growing import GrowingManifest, GrowingSettings, load_or_grow
from pipelines.text.manifest import Manifest
from pipelines.text.packing import PackingConfig
from pipelines.text.prepare import PrepareConfig, describe, prepare_text
from pipelines.text.rows import shard_bytes
from pipelines.text.tokenization import load_tokenizer

_MAX_BAD_SHARE_FIELD = "data.max_bad_share"


def prepare_split(config: LanguageModelConfig, split: str) -> Manifest:
    """Return the manifest of the packed blocks of `train` or `validation`, preparing them unless this was done before.

    Ray must be running. The prepared blocks are kept in the directory of prepared data, which runs share.
    """
    started = time.monotonic()
    manifest = prepare_text(
        _prepare_config(config, split),
        _layout(config),
        config.run.prepared_directory,
        max_bad_share_field=_MAX_BAD_SHARE_FIELD,
    )
    print(f"{split:<12} {describe(manifest, time.monotonic() - started)}", flush=True)
    cache_for(config, manifest, split)
    return manifest


def prepare_training_text(config: LanguageModelConfig) -> Manifest | GrowingManifest:
    """Return the manifest of the training blocks, which still grows if `data.prepare` says so and some are missing.

    Ray must be running.
    """
    data = config.data
    if data.prepare == "ahead":
        return prepare_split(config, "train")
    manifest = load_or_grow(
        _prepare_config(config, "train"),
        _layout(config),
        config.run.prepared_directory,
        GrowingSettings(
            seed=config.run.seed,
            num_parts_ahead=data.num_parts_ahead,
            num_cpus=data.prepare_cpus,
            resources=data.resources,
            max_bad_share=data.max_bad_share,
            max_bad_share_field=_MAX_BAD_SHARE_FIELD,
        ),
    )
    text = describe(manifest) if isinstance(manifest, Manifest) else manifest.describe()
    print(f"{'train':<12} {text}", flush=True)
    return manifest


def describe_data(train: Manifest | GrowingManifest, validation: Manifest) -> dict[str, Any]:
    """Return the entries of a run's outcome that tell what its data hold, as far as they are prepared.

    `num_samples` and `num_blocks_train` are None if parts of the training text are still missing.
    """
    if isinstance(train, GrowingManifest):
        train = train.latest()
    num_blocks = train.num_rows if isinstance(train, Manifest) else None
    return {
        "num_samples": num_blocks,
        "num_blocks_train": num_blocks,
        "num_documents_lost": {"train": dict(train.problems), "validation": dict(validation.problems)},
    }


def _prepare_config(config: LanguageModelConfig, split: str) -> PrepareConfig:
    data = config.data
    return PrepareConfig(
        source=getattr(data, split),
        tokenizer=config.tokenizer,
        text_field=data.text_field,
        max_bad_share=data.max_bad_share,
    )


def _layout(config: LanguageModelConfig) -> PackingConfig:
    return PackingConfig.for_tokenizer(load_tokenizer(config.tokenizer), config.data.context_length)


def cache_for(config: LanguageModelConfig, manifest: Manifest | GrowingManifest, split: str = "") -> int:
    """Return the size of the node's cache for a split; one that is too small is reported if the split is named."""
    if isinstance(manifest, GrowingManifest):
        return round(config.data.cache_gib * GIB)  # How large a window is, is not known yet.
    return cache_bytes(
        config.data,
        plan=manifest.plan(seed=config.run.seed, window_size=config.data.shuffle_window),
        shard_bytes=shard_bytes(manifest),
        split=split,
    )
