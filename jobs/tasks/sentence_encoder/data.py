"""Prepares and reads the documents on which a sentence encoder is trained."""

from __future__ import annotations

import time

import numpy as np

from jobs.tasks.node_cache import cache_bytes
from jobs.tasks.sentence_encoder.config import SentenceConfig
from pipelines.sentences.span_source import SpanSource
from pipelines.stream import Batch
from pipelines.text.documents import DocumentConfig
from pipelines.text.manifest import Manifest
from pipelines.text.prepare import PrepareConfig, describe, prepare_text
from pipelines.text.rows import shard_bytes
from pipelines.text.tokenization import SpecialTokens, load_tokenizer

# Random seed of the spans that are scored in validation, which are the same for all runs.
VALIDATION_SEED = 0


def prepare_split(config: SentenceConfig, split: str) -> Manifest:
    """Return the manifest of the documents of `train` or `validation`, preparing them unless this was done before.

    Ray must be running. The prepared documents are kept in the directory of prepared data, which runs share.

    Raises:
        ValueError: if no document is long enough.
    """
    started = time.monotonic()
    data = config.data
    tokenizer = load_tokenizer(config.tokenizer, needs_eos=False)
    manifest = prepare_text(
        PrepareConfig(
            source=getattr(data, split),
            tokenizer=config.tokenizer,
            text_field=data.text_field,
            max_bad_share=data.max_bad_share,
        ),
        DocumentConfig(least_num_tokens=data.least_num_tokens, vocab_size=len(tokenizer)),
        config.run.prepared_directory,
        max_bad_share_field="data.max_bad_share",
    )
    print(f"{split:<12} {describe(manifest, time.monotonic() - started)}", flush=True)
    cache_for(config, manifest, split)
    if not manifest.num_rows:
        raise ValueError(
            f"data.{split} = {getattr(data, split)!r} holds no document of {data.least_num_tokens} tokens, which spans "
            f"of data.max_length = {data.max_length} need: choose shorter spans, fewer anchors or a smaller min_num_tokens"
        )
    return manifest


def cache_for(config: SentenceConfig, manifest: Manifest, split: str = "") -> int:
    """Return the size of the node's cache for a split; one that is too small is reported if the split is named."""
    return cache_bytes(
        config.data,
        plan=manifest.plan(seed=config.run.seed, window_size=config.data.shuffle_window),
        shard_bytes=shard_bytes(manifest),
        split=split,
    )


def span_source(config: SentenceConfig, manifest: Manifest, *, seed: int) -> SpanSource:
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
