"""Building the module that is trained: a Transformers classifier, and the centres of SoftTriple."""

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedModel, PreTrainedTokenizerFast

from jobs.classifiers.config import ClassifierConfig, soft_triple_config
from tempnet.contrastive.world import World
from tempnet.models.sentence_encoder import num_positions
from tempnet.models.triple_entropy_classifier import TripleEntropyClassifier
from tempnet.soft_triple import SoftTriple


def build_classifier(
    config: ClassifierConfig, tokenizer: PreTrainedTokenizerFast, class_names: tuple[str, ...]
) -> PreTrainedModel:
    """The body, loaded or at random from the seed, with a fresh head; the same on every rank.

    Raises:
        ValueError: if there is none, or it is too small for the tokenizer or the sentences.
    """
    torch.manual_seed(config.run.seed)
    settings, width = config.model, config.data.num_tokens
    labels = {"id2label": dict(enumerate(class_names)), "label2id": {name: at for at, name in enumerate(class_names)}}
    if settings.path:
        try:
            model: PreTrainedModel = AutoModelForSequenceClassification.from_pretrained(
                settings.path,
                dtype=torch.float32,
                use_safetensors=True,
                attn_implementation=settings.attention,
                # Another task's head is replaced.
                ignore_mismatched_sizes=True,
                **labels,
            )
        except (OSError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            raise ValueError(f"model.path = {settings.path!r} holds no text model: {reason}") from error
    else:
        model = AutoModelForSequenceClassification.from_config(
            AutoConfig.for_model(
                "roberta",
                vocab_size=len(tokenizer),
                hidden_size=settings.hidden_size,
                intermediate_size=4 * settings.hidden_size,
                num_hidden_layers=settings.num_layers,
                num_attention_heads=settings.num_heads,
                hidden_dropout_prob=settings.dropout,
                attention_probs_dropout_prob=settings.dropout,
                # RoBERTa's positions start after the padding's own.
                max_position_embeddings=width + int(tokenizer.pad_token_id) + 1,
                type_vocab_size=2,
                pad_token_id=tokenizer.pad_token_id,
                **labels,
            ),
            attn_implementation=settings.attention,
        )
    model.config.pad_token_id = tokenizer.pad_token_id
    if config.workers.activation_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    num_embeddings = next(model.get_input_embeddings().parameters()).shape[0]
    if len(tokenizer) > num_embeddings:
        raise ValueError(
            f"data.tokenizer = {config.tokenizer!r} has {len(tokenizer)} tokens, more than the {num_embeddings} of the "
            "model: use the model's own tokenizer"
        )
    most = num_positions(model.config)
    if most is not None and width > most:
        raise ValueError(
            f"data.num_tokens = {width} is more than the {most} positions of the model: choose at most {most}"
        )
    return model


def build_model(
    config: ClassifierConfig, tokenizer: PreTrainedTokenizerFast, class_names: tuple[str, ...]
) -> TripleEntropyClassifier:
    """The module, the same on every rank, on the CPU.

    Raises:
        ValueError: as :func:`build_classifier`.
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
        autocast_dtype=torch.bfloat16 if config.workers.precision == "bf16" else None,
    )
