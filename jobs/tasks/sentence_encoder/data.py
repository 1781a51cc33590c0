"""Prepares and reads the documents on which a sentence encoder is trained."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from jobs.engine.task import Task
from jobs.engine.temperature import check_sizes
from jobs.tasks.sentence_encoder.config import SentenceConfig
from jobs.tasks.text.data import cache_for, describe_data, find, prepare_split, prepare_training_text
from pipelines.sentences.spans import SpanSource
from pipelines.stream import Batch
from pipelines.text.growing import GrowingManifest
from pipelines.text.manifest import Manifest
from pipelines.text.packing import DocumentConfig
from pipelines.text.tokenization import SpecialTokens, load_tokenizer

# Random seed of the spans that are scored in validation, which are the same for all runs.
VALIDATION_SEED = 0


def prepare_documents(config: SentenceConfig) -> tuple[Manifest | GrowingManifest, Manifest]:
    """Return the manifests of the documents of `train` and `validation`, preparing them unless this was done before.

    The first one still grows if `data.prepare` says so and parts are missing.

    Raises:
        ValueError: if the documents are too short or too few. While they grow, the reading of them raises it.
    """
    tokenizer = load_tokenizer(config.tokenizer, needs_eos=False)
    layout = DocumentConfig(least_num_tokens=config.data.least_num_tokens, vocab_size=len(tokenizer))
    return (
        prepare_training_text(config, layout, partial(_check_training_documents, config)),
        prepare_split(config, layout, "validation", partial(_check_documents, config, "validation")),
    )


def _check_training_documents(config: SentenceConfig, num_documents: int) -> None:
    """Check that the training documents are enough for the batch and the loss."""
    _check_documents(config, "train", num_documents)
    check_sizes(
        config,
        config.temperature if config.is_contrastive else None,
        num_samples=num_documents,
        num_pairs_per_batch=config.num_pairs_per_batch,
        noun="documents",
    )


def _check_documents(config: SentenceConfig, split: str, num_documents: int) -> None:
    """Check that some document is long enough."""
    data = config.data
    if not num_documents:
        raise ValueError(
            f"data.{split} = {getattr(data, split)!r} holds no document of {data.least_num_tokens} tokens, which spans "
            f"of data.max_length = {data.max_length} need: choose shorter spans, fewer anchors or a smaller min_num_tokens"
        )


def describe_documents(train: Manifest | GrowingManifest, validation: Manifest) -> dict[str, Any]:
    """Return the entries of a run's outcome that tell what its data hold, as far as they are prepared.

    The numbers of training documents are None if parts of the text are still missing.
    """
    return {
        **describe_data(train, validation, noun="documents"),
        "num_documents_too_short": {
            split: manifest.num_documents - manifest.num_rows if isinstance(manifest, Manifest) else None
            for split, manifest in (("train", train.latest()), ("validation", validation))
        },
    }


def span_source(config: SentenceConfig, manifest: Manifest | GrowingManifest, *, seed: int) -> SpanSource:
    """Return the source that draws spans from prepared documents."""
    return SpanSource(
        manifest=manifest,
        spans=config.data,
        special_tokens=SpecialTokens.of(load_tokenizer(config.tokenizer, needs_eos=False)),
        seed=seed,
        mask_share=config.data.mask_share if config.objective.mlm_weight else 0.0,
        cache_bytes=cache_for(config, manifest),
    )


def read_documents(source: SpanSource, ids: np.ndarray) -> Batch:
    """Read the spans of documents as drawn in epoch 0; `ids` number all documents from 0."""
    shards = np.searchsorted(source.first_rows, ids, side="right") - 1
    return source.read(shards, ids - source.first_rows[shards], 0)


def create_task(
    config: SentenceConfig, train: str | GrowingManifest, validation: str, rank: int, world_size: int
) -> Task:
    """Create the task on a worker.

    Args:
        config: configuration of the run.
        train: directory of the prepared training documents, or what is known of them while they still grow.
        validation: directory of the prepared validation documents.
        rank: rank of this worker.
        world_size: number of workers.
    """
    from jobs.tasks.sentence_encoder.task import SentenceTask

    config = config.with_num_workers(world_size)
    return SentenceTask(config, find(train), Manifest.load(validation), rank, world_size)
