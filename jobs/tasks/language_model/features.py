"""Finds the stored hidden states of a frozen base for the text of a run (`jobs.prepare_features` stores them)."""

from __future__ import annotations

from jobs.tasks.language_model.config import LanguageModelConfig
from jobs.tasks.language_model.models import base_config
from pipelines.text.features import Features, features_directory
from pipelines.text.manifest import Manifest
from pipelines.text.tokenization import load_tokenizer
from tempnet.base_model import BaseReference


def features_of(config: LanguageModelConfig, text: Manifest, base: BaseReference) -> Features:
    """Return where the features of a prepared text are, or will be, for the base and the precision of a run."""
    directory = features_directory(
        config.run.prepared_directory,
        text,
        base=base.digest,
        precision=config.workers.resolved_precision,
        attend_across_documents=config.data.attend_across_documents,
    )
    hidden_size = base_config(config, load_tokenizer(config.tokenizer)).get_text_config().hidden_size
    return Features(directory=directory, text=text, hidden_size=hidden_size)


def find_features(config: LanguageModelConfig, text: Manifest, base: BaseReference, split: str) -> Features:
    """Return the features of a prepared text.

    Args:
        config: configuration of the run.
        text: the prepared text.
        base: the frozen base model.
        split: train or validation, for the message.

    Raises:
        FileNotFoundError: if they were not prepared, or not all of them.
    """
    features = features_of(config, text, base)
    try:
        return Features.load(features.directory, text)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"model.features = True, but the hidden states of data.{split} for this base, text and precision are not stored "
            f"in {features.directory}: store them by the same command with jobs.prepare_features in the place of "
            "jobs.train_lm"
        ) from error
