"""Finds the stored hidden states of a frozen base for the text of a run (`jobs.prepare_features` stores them)."""

from __future__ import annotations

from jobs.tasks.language_model.config import LanguageModelConfig
from jobs.tasks.language_model.models import base_config
from pipelines.features import Features, features_directory
from pipelines.text.growing import GrowingManifest
from pipelines.text.manifest import Manifest
from pipelines.text.tokenization import load_tokenizer
from tempnet.base_model import BaseReference


def features_of(config: LanguageModelConfig, text: Manifest, base: BaseReference) -> Features:
    """Return where the features of a prepared text are, or will be, for the base and the precision of a run."""
    directory = features_directory(
        config.run.prepared_directory,
        text,
        base=base.digest,
        precision=config.base_precision,
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


def features_to_read(
    config: LanguageModelConfig,
    base: BaseReference | None,
    train_data: Manifest | GrowingManifest,
    validation_data: Manifest,
) -> tuple[str, str] | None:
    """Return the directories of the stored hidden states of both data sets; None if the base is to compute them.

    Raises:
        ValueError: if it is to be spread over devices for that.
        FileNotFoundError: if hidden states are missing.
    """
    if not config.model.features:
        if config.model.device_map:
            raise ValueError(
                f"model.device_map = {config.model.device_map} spreads a base for jobs.prepare_features only: store its "
                "hidden states by that job and train with model.features, or divide the base by workers.zero_stage = 3"
            )
        return None
    assert base is not None
    assert isinstance(train_data, Manifest)
    return (
        find_features(config, train_data, base, "train").directory,
        find_features(config, validation_data, base, "validation").directory,
    )
