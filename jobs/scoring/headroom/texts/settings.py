"""The settings of a headroom test: a configuration, completed and checked against model and text.

All of this happens before Ray is started or the model is loaded.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from transformers import AutoConfig, PretrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING_NAMES,
)

from jobs.engine.fields import absolute_path
from jobs.engine.fingerprints import model_digest
from jobs.scoring.headroom.config import Headroom
from jobs.scoring.temperatures.texts.settings import archive_sizes, choose_windows, list_sources
from jobs.tasks.base import naming_field
from jobs.tasks.language_model.training_text import warn_of_known_text
from pipelines.archives import Archive
from pipelines.local_copy import is_directory, local_copy
from pipelines.sources import check_source
from pipelines.storage import join
from pipelines.text.reading import Document, readable_documents
from pipelines.text.tokenization import document_start_id, load_tokenizer, tokenizer_digest
from tempnet.models.dual_encoder_config import IMAGE_ENCODER_DIRECTORY
from tempnet.weights import check_weight_files

FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadroomSettings:
    """Settings for the workers; local paths are absolute, because a worker has its own working directory."""

    source: str
    model: str
    text_field: str
    context_length: int
    stride: int
    batch_size: int
    precision: Literal["fp32", "bf16", "int8", "fp8"]
    tokens_per_document: int
    max_documents: int
    part_characters: int
    vocab_size: int
    bos_id: int
    model_digest: str
    tokenizer_digest: str
    known_text: tuple[str, ...]
    """Names of archives that the model is known to have been trained on."""

    def record(self, archives: list[Archive]) -> dict[str, Any]:
        """Returns everything that decides the measured tokens, without file locations and the batch size."""
        left_out = ("source", "model", "batch_size", "known_text")
        values = {name: value for name, value in asdict(self).items() if name not in left_out}
        return {"version": FORMAT_VERSION, **values, **archive_sizes(self.source, archives)}


def resolve_settings(config: Headroom) -> tuple[HeadroomSettings, list[Archive]]:
    """Returns the settings and the archives of a configuration.

    Raises:
        FileNotFoundError, OSError: if the text or the model is missing.
        ValueError: if they do not fit together, a field does not fit them, or there are fewer documents than folds.
    """
    with naming_field("text: "):
        archives = list_sources(config.text)
    with naming_field("model = "):
        check_source(local_copy(config.model, with_weights=False))
    if is_directory(join(config.model, IMAGE_ENCODER_DIRECTORY)):
        raise ValueError(_no_image_text_model(config.model))
    tokenizer = load_tokenizer(config.model)
    check_weight_files(place := local_copy(config.model))
    model = AutoConfig.from_pretrained(place, trust_remote_code=False)
    _check_kind(config.model, model)
    base = model.get_text_config()
    if len(tokenizer) > base.vocab_size:
        raise ValueError(
            f"model = {config.model!r}: its tokenizer has {len(tokenizer)} tokens, more than its {base.vocab_size} logits"
        )
    context_length, stride = choose_windows(config.model, base, config.context_length, config.stride)
    _check_number_of_documents(config, archives)
    known = warn_of_known_text(config.model, config.text, archives, field="text")
    return HeadroomSettings(
        source=absolute_path(config.text),
        model=absolute_path(config.model),
        text_field=config.text_field,
        context_length=context_length,
        stride=stride,
        batch_size=config.batch_size,
        precision=config.precision,
        tokens_per_document=config.tokens_per_document,
        max_documents=config.max_documents,
        part_characters=config.part_characters,
        vocab_size=len(tokenizer),
        bos_id=document_start_id(tokenizer),
        model_digest=model_digest(config.model),
        tokenizer_digest=tokenizer_digest(tokenizer),
        known_text=tuple(known),
    ), archives


def _no_image_text_model(model: str) -> str:
    return f"model = {model!r} is an image–text model, and text is for causal language models: give images in its place"


def _check_kind(model: str, config: PretrainedConfig) -> None:
    """Refuse models that predict no next token.

    Raises:
        ValueError: if the model is one of images and texts, or an encoder of texts.
    """
    if config.model_type in MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING_NAMES:
        raise ValueError(_no_image_text_model(model))
    if config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(config, "is_decoder", False):
        raise ValueError(
            f"model = {model!r} is an encoder ({config.model_type}), and text is for causal language models, which "
            "predict the next token"
        )


def _check_number_of_documents(config: Headroom, archives: list[Archive]) -> None:
    """Reads documents until there are as many as folds.

    Raises:
        ValueError: if there are fewer.
    """

    def documents() -> Iterator[Document]:
        for archive in archives:
            found = readable_documents(config.text, archive, config.text_field, Counter(), [])
            yield from itertools.islice(found, config.max_documents or None)

    number = sum(1 for _ in itertools.islice(documents(), config.folds))
    if number < config.folds:
        raise ValueError(
            f"text = {config.text!r} has {number} readable documents, fewer than folds = {config.folds}: the interval is "
            "over documents, so give more text, or text with a record for every document"
        )
