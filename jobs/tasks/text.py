"""Prepares text for training, ahead or while training runs, and describes what it holds."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from jobs.engine.hardware import GIB
from jobs.tasks.base import cache_bytes, check_resources
from pipelines.text.blocks import shard_bytes
from pipelines.text.growing import GrowingManifest, GrowingSettings, load_or_grow
from pipelines.text.manifest import Layout, Manifest
from pipelines.text.prepare import PrepareConfig, describe, prepare_text

if TYPE_CHECKING:  # they import this module
    from jobs.tasks.language_model.config import LanguageModelConfig
    from jobs.tasks.sentence_encoder.config import SentenceConfig

TextConfig: TypeAlias = "LanguageModelConfig | SentenceConfig"
CheckNumRows = Callable[[int], None]
"""Function that refuses a number of rows by an error; workers call it too, so that it can be pickled."""

_MAX_BAD_SHARE_FIELD = "data.max_bad_share"


def prepare_split(
    config: TextConfig, layout: Layout, split: str, check_num_rows: CheckNumRows | None = None
) -> Manifest:
    """Return the manifest of `train` or `validation`, preparing the text unless this was done before."""
    started = time.monotonic()
    check_resources(config.data, config.run.max_wait_minutes)
    manifest = prepare_text(
        _prepare_config(config, split),
        layout,
        config.run.prepared_directory,
        max_bad_share_field=_MAX_BAD_SHARE_FIELD,
        resources=config.data.resources,
    )
    print(f"{split:<12} {describe(manifest, time.monotonic() - started)}", flush=True)
    if check_num_rows is not None:
        check_num_rows(manifest.num_rows)
    cache_for(config, manifest, split)
    return manifest


def prepare_training_text(
    config: TextConfig, layout: Layout, check_num_rows: CheckNumRows | None = None
) -> Manifest | GrowingManifest:
    """Return the manifest of the training text, which may still grow with `data.prepare = streaming`; then the number of its
    rows is checked as soon as it is known.
    """
    data = config.data
    if not data.is_streaming:
        return prepare_split(config, layout, "train", check_num_rows)
    check_resources(data, config.run.max_wait_minutes)
    settings = GrowingSettings(
        seed=config.run.seed,
        num_parts_ahead=data.num_parts_ahead,
        num_cpus=data.prepare_cpus,
        resources=data.resources,
        max_bad_share=data.max_bad_share,
        max_bad_share_field=_MAX_BAD_SHARE_FIELD,
    )
    source = _prepare_config(config, "train")
    manifest = load_or_grow(source, layout, config.run.prepared_directory, settings, check_num_rows)
    if isinstance(manifest, GrowingManifest):
        from jobs.engine.ray_private import wait_until_started

        wait_until_started(manifest.preparer)
    text = describe(manifest) if isinstance(manifest, Manifest) else manifest.describe()
    print(f"{'train':<12} {text}", flush=True)
    return manifest


def refer_to(train: Manifest | GrowingManifest) -> str | GrowingManifest:
    """Return what workers need to find the training text: its directory, or what is known of it while it grows."""
    return train.directory if isinstance(train, Manifest) else train


def find(reference: Any) -> Any:
    """Return the manifest of a text on a worker; the inverse of :func:`refer_to`."""
    return Manifest.load(reference) if isinstance(reference, str) else reference


def describe_data(train: Manifest | GrowingManifest, validation: Manifest, *, noun: str) -> dict[str, Any]:
    """Return the entries of a run's outcome that tell what its data hold; numbers of the training text are None while parts
    of it are missing.
    """
    train = train.latest()
    return {
        "num_samples": train.num_rows,
        f"num_{noun}_train": train.num_rows,
        "num_documents_lost": {"train": dict(train.problems), "validation": dict(validation.problems)},
    }


def cache_for(config: TextConfig, manifest: Manifest | GrowingManifest, split: str = "") -> int:
    """Return the size of the node's cache for a split; one that is too small is reported if the split is named."""
    if isinstance(manifest, GrowingManifest):
        return round(config.data.cache_gib * GIB)  # How large a window is, is not known yet.
    plan = manifest.plan(seed=config.run.seed, window_size=config.data.shuffle_window)
    return cache_bytes(config.data, plan=plan, shard_bytes=shard_bytes(manifest), split=split)


def _prepare_config(config: TextConfig, split: str) -> PrepareConfig:
    data = config.data
    return PrepareConfig(
        source=getattr(data, split) or data.train,
        tokenizer=config.tokenizer,
        text_field=data.text_field,
        max_bad_share=data.max_bad_share,
    )
