"""Prepares text for training, ahead or while training runs, and describes what it holds."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

from jobs.engine.config import RunSection
from jobs.tasks.node_cache import GIB, cache_bytes
from jobs.tasks.text.config import TextSection
from pipelines.text.blocks import shard_bytes
from pipelines.text.growing import GrowingManifest, GrowingSettings, load_or_grow
from pipelines.text.manifest import Layout, Manifest
from pipelines.text.prepare import PrepareConfig, describe, prepare_text

_MAX_BAD_SHARE_FIELD = "data.max_bad_share"

CheckNumRows = Callable[[int], None]
"""Function that refuses a number of rows by an error; workers call it too, so that it can be pickled."""


class TextConfig(Protocol):
    """What the configurations of all tasks that learn from text have in common."""

    @property
    def data(self) -> TextSection:
        """The text."""
        ...

    @property
    def run(self) -> RunSection:
        """The run; it names the directory of prepared data, which runs share."""
        ...

    @property
    def tokenizer(self) -> str:
        """Directory, file or hub name of the tokenizer."""
        ...


def prepare_split(
    config: TextConfig, layout: Layout, split: str, check_num_rows: CheckNumRows | None = None
) -> Manifest:
    """Return the manifest of `train` or `validation`, preparing the text unless this was done before.

    Args:
        config: configuration of the run.
        layout: how documents become rows.
        split: name of the field of the data section that names the text.
        check_num_rows: refuses a number of rows.
    """
    started = time.monotonic()
    _check_placement(config.data.resources)
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
    """Return the manifest of the training text, which still grows if `data.prepare` says so and parts are missing.

    Args:
        config: configuration of the run.
        layout: how documents become rows.
        check_num_rows: refuses a number of rows, as soon as it is known.
    """
    data = config.data
    if not data.is_streaming:
        return prepare_split(config, layout, "train", check_num_rows)
    _check_placement(data.resources)
    manifest = load_or_grow(
        _prepare_config(config, "train"),
        layout,
        config.run.prepared_directory,
        GrowingSettings(
            seed=config.run.seed,
            num_parts_ahead=data.num_parts_ahead,
            num_cpus=data.prepare_cpus,
            resources=data.resources,
            max_bad_share=data.max_bad_share,
            max_bad_share_field=_MAX_BAD_SHARE_FIELD,
        ),
        check_num_rows,
    )
    text = describe(manifest) if isinstance(manifest, Manifest) else manifest.describe()
    print(f"{'train':<12} {text}", flush=True)
    return manifest


def refer_to(train: Manifest | GrowingManifest) -> str | GrowingManifest:
    """Return what workers need to find the training text: its directory, or what is known of it while it grows."""
    return train.directory if isinstance(train, Manifest) else train


def find(reference: str | GrowingManifest) -> Manifest | GrowingManifest:
    """Return the training text on a worker; the inverse of :func:`refer_to`."""
    return Manifest.load(reference) if isinstance(reference, str) else reference


def describe_data(train: Manifest | GrowingManifest, validation: Manifest, *, noun: str) -> dict[str, Any]:
    """Return the entries of a run's outcome that tell what its data hold, as far as they are prepared.

    `num_samples` and `num_<noun>_train` are None if parts of the training text are still missing.

    Args:
        train, validation: the data of the run.
        noun: what the rows are called: blocks or documents.
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
    return cache_bytes(
        config.data,
        plan=manifest.plan(seed=config.run.seed, window_size=config.data.shuffle_window),
        shard_bytes=shard_bytes(manifest),
        split=split,
    )


def _check_placement(resources: dict[str, float]) -> None:
    if resources:  # a run in this process does without Ray, whose import takes seconds
        from jobs.engine.cluster import check_placement

        check_placement("data.reader_resources", resources)


def _prepare_config(config: TextConfig, split: str) -> PrepareConfig:
    data = config.data
    return PrepareConfig(
        source=getattr(data, split) or data.train,
        tokenizer=config.tokenizer,
        text_field=data.text_field,
        max_bad_share=data.max_bad_share,
    )
