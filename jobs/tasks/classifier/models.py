"""Builds the module to train: a Transformers classifier and the class centres of SoftTriple."""

from __future__ import annotations

import torch
from transformers import AutoModelForSequenceClassification, PreTrainedModel, PreTrainedTokenizerFast

from jobs.engine import encoders
from jobs.tasks.classifier.config import ClassifierConfig, soft_triple_config
from tempnet.contrastive.state import World
from tempnet.models.sentence_encoder import num_positions
from tempnet.models.triple_entropy_classifier import TripleEntropyClassifier
from tempnet.soft_triple import SoftTriple


def build_classifier(
    config: ClassifierConfig, tokenizer: PreTrainedTokenizerFast, class_names: tuple[str, ...]
) -> PreTrainedModel:
    """Build the Transformers classifier: a pretrained or random text model with a new head, the same on every rank.

    Raises:
        ValueError: if the model cannot be loaded, or is too small for the tokenizer or the length of the sentences.
    """
    width = config.data.num_tokens
    model = encoders.build_encoder(
        config.model,
        AutoModelForSequenceClassification,
        what="text model",
        tokenizer=tokenizer,
        tokenizer_name=config.tokenizer,
        num_tokens=width,
        seed=config.run.seed,
        with_checkpointing=config.workers.activation_checkpointing,
        id2label=dict(enumerate(class_names)),
        label2id={name: number for number, name in enumerate(class_names)},
    )
    model.config.pad_token_id = tokenizer.pad_token_id
    most = num_positions(model.config)
    if most is not None and width > most:
        raise ValueError(
            f"data.num_tokens = {width} is more than the {most} positions of the model: choose at most {most}"
        )
    return model


def build_model(
    config: ClassifierConfig, tokenizer: PreTrainedTokenizerFast, class_names: tuple[str, ...]
) -> TripleEntropyClassifier:
    """Build the module to train on the CPU, with the same weights on every rank.

    Raises:
        ValueError: see :func:`build_classifier`.
    """
    model = build_classifier(config, tokenizer, class_names)
    soft_triple = None
    if not config.setting.cross_entropy_alone:
        settings = soft_triple_config(config.setting, config.centers)
        soft_triple = SoftTriple(int(model.config.hidden_size), len(class_names), settings)
    return TripleEntropyClassifier(
        model,
        soft_triple,
        with_padding=config.centers.with_padding,
        world=World.current(),
        autocast_dtype=torch.bfloat16 if config.workers.resolved_precision == "bf16" else None,
    )
