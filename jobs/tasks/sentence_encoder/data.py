"""The documents on which a sentence encoder is trained, and the module to train: an encoder, its MLM head and the loss."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForMaskedLM, PreTrainedModel, PreTrainedTokenizerFast

from jobs.tasks import base
from jobs.tasks.base import autocast_dtype, naming_field, unimodal_loss, unimodal_networks
from jobs.tasks.config import check_sizes
from jobs.tasks.sentence_encoder.config import SentenceConfig
from jobs.tasks.text import cache_for, describe_data, prepare_split, prepare_training_text
from pipelines.sentences.spans import SpanSource
from pipelines.stream import Batch
from pipelines.text.growing import GrowingManifest
from pipelines.text.manifest import Manifest
from pipelines.text.packing import DocumentConfig
from pipelines.text.tokenization import SpecialTokens, load_tokenizer
from tempnet.contrastive.state import World
from tempnet.models.sentence_encoder import TemperatureSentenceEncoder, num_positions

MIN_POSITIONS = 128
"""Positions of a new encoder, also where it is trained on shorter spans: what is longer would be cut when it is used."""


def prepare_documents(config: SentenceConfig) -> tuple[Manifest | GrowingManifest, Manifest]:
    """Return the manifests of the documents of `train` and `validation`, preparing them unless this was done before.

    The first one still grows if `data.prepare` says so and parts are missing.
    """
    tokenizer = load_tokenizer(config.tokenizer, needs_eos=False)
    layout = DocumentConfig(least_num_tokens=config.data.least_num_tokens, vocab_size=len(tokenizer))
    share = replace(layout, share=config.data.train_share, share_seed=config.run.seed)
    return (
        prepare_training_text(
            config, layout if share.share == 1.0 else share, partial(_check_training_documents, config)
        ),
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
    """Return the entries of a run's outcome that tell what its data hold; None while parts of the text are missing."""
    return {
        **describe_data(train, validation, noun="documents"),
        "num_documents_too_short": {"train": num_too_short(train.latest()), "validation": num_too_short(validation)},
    }


def num_too_short(manifest: Manifest | GrowingManifest) -> int | None:
    """Return the number of documents too short for spans; None if only a share is used, or while parts are missing."""
    if not isinstance(manifest, Manifest) or getattr(manifest.layout, "share", 1.0) < 1.0:
        return None
    return manifest.num_documents - manifest.num_rows


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


def build_encoder(config: SentenceConfig, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """Build the encoder with its MLM head, pretrained or randomly initialised, the same on every rank."""
    with naming_field("data."):
        special = SpecialTokens.of(tokenizer)
    width = config.data.max_length + special.num_added
    model = base.build_encoder(
        config.model,
        AutoModelForMaskedLM,
        what="encoder with an MLM head",
        tokenizer=tokenizer,
        tokenizer_name=config.tokenizer,
        num_tokens=max(width, MIN_POSITIONS),
        seed=config.run.seed,
        with_checkpointing=config.workers.activation_checkpointing,
    )
    most = num_positions(model.config)
    if most is not None and width > most:
        raise ValueError(
            f"data.max_length = {config.data.max_length} with {special.num_added} special tokens is more than the "
            f"{most} positions of the encoder: choose at most {most - special.num_added}"
        )
    return model


def build_networks(config: SentenceConfig, width: int) -> dict[str, Any]:
    """Return the loss's new networks, which read embeddings of the given width, by the names that `UnimodalLoss` has."""
    return unimodal_networks(config.temperature, width) if config.is_contrastive else {}


def build_model(
    config: SentenceConfig, tokenizer: PreTrainedTokenizerFast, *, num_documents: int | None, device: torch.device
) -> TemperatureSentenceEncoder:
    """Build the module to train, with the loss's state of `num_documents` documents partitioned among the ranks.

    The number may be unknown (None) if the loss keeps no state of documents.
    """
    encoder = build_encoder(config, tokenizer)
    loss = None
    if config.is_contrastive:
        width = int(encoder.config.hidden_size)
        loss = unimodal_loss(config.temperature, width, num_samples=num_documents, device=device)
    module = TemperatureSentenceEncoder(
        encoder,
        loss,
        contrastive_weight=config.objective.contrastive_weight,
        mlm_weight=config.objective.mlm_weight,
        world=World.current(),
        autocast_dtype=autocast_dtype(config),
    )
    return module.to(device)
