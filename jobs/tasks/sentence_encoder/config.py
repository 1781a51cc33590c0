"""The configuration of a sentence encoder's training: its own sections beside those of every run."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from pipelines.sentences.spans import SpanConfig, Strategy
from tempnet.contrastive.config import LOSS_KINDS

from jobs.engine.config import (
    EncoderSection,
    RunSection,
    ValidationSection,
    check_positive,
    check_share,
    with_absolute_fields,
)
from jobs.engine.contrastive import ContrastiveSection, ContrastiveTrainingConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentSection:
    """Documents in, spans out (DeCLUTR §3.1)."""

    train: str
    """Training text: archives in any form that `jobs.prepare_text` reads, one or a directory of them, path or URI."""
    validation: str
    """Validation text."""
    tokenizer: str = ""
    """A Transformers fast tokenizer with a mask token: directory or hub name. Empty: that of model.path."""
    text_field: str = "text"
    """The field (column) that holds the text."""
    num_anchors: int = 2
    """A, anchors a document."""
    num_positives: int = 2
    """P, positives an anchor."""
    min_length: int = 32
    """l_min, tokens of a span at least."""
    max_length: int = 512
    """l_max, tokens of a span at most; the tokenizer's special tokens come on top."""
    strategy: Strategy = "any"
    """Where positives lie: any (overlapping, adjacent or inside their anchor), subsuming, adjacent."""
    min_num_tokens: int = 0
    """Documents with fewer tokens are left out, and counted. 0: 2·A·l_max, as in the paper; (A + 1)·l_max at least."""
    mask_share: float = 0.15
    """Share of the anchors' tokens that the MLM objective masks."""
    max_bad_share: float = 0.01
    """Share of documents that may be unreadable before the run fails."""
    shuffle_window: int = 32_768
    """Documents among which the order is fully random; shards are permuted beyond it."""

    def __post_init__(self) -> None:
        check_positive("data", self, "shuffle_window")
        check_share("data", self, "max_bad_share", "mask_share")
        try:
            _ = self.spans
        except ValueError as error:
            raise ValueError(f"data.{error}") from error

    @property
    def spans(self) -> SpanConfig:
        """How spans are drawn."""
        names = ("num_anchors", "num_positives", "min_length", "max_length", "strategy", "min_num_tokens")
        return SpanConfig(**{name: getattr(self, name) for name in names})


@dataclass(frozen=True, slots=True, kw_only=True)
class SentenceEncoderSection(EncoderSection):
    """The encoder: weights to start from, or sizes to start at random."""

    path: str = ""
    """A Transformers encoder with an MLM head: directory or hub name. Empty: a random RoBERTa of the sizes below."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveSection:
    """What is learned; a weight of 0 leaves it out."""

    contrastive_weight: float = 1.0
    """Of the contrastive loss between anchors and their positives."""
    mlm_weight: float = 1.0
    """Of predicting the anchors' masked tokens."""

    def __post_init__(self) -> None:
        for name in ("contrastive_weight", "mlm_weight"):
            if not getattr(self, name) >= 0.0:
                raise ValueError(f"objective.{name} = {getattr(self, name)} must not be negative")
        if not (self.contrastive_weight or self.mlm_weight):
            raise ValueError("objective.contrastive_weight = objective.mlm_weight = 0 leaves nothing to learn")


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentTemperatureSection(ContrastiveSection):
    """The contrastive loss and its temperatures (`tempnet.contrastive.config`); one TempNet serves anchors and positives."""

    loss: str = "clip_fixed"
    """clip_fixed (NT-Xent at tau), clip (a learned temperature), tempnet, tempnet_in_batch, temperature_free, sogclr, or
    isogclr (a temperature for every document)."""
    tau: float | None = 0.05
    """The fixed temperature, or where a learned one starts."""

    def __post_init__(self) -> None:
        ContrastiveSection.__post_init__(self)
        if LOSS_KINDS[self.loss].is_cyclic or LOSS_KINDS[self.loss].temperature == "given":
            raise ValueError(f"temperature.loss = {self.loss!r} is for images with captions")
        if self.target_tau is not None:
            raise ValueError(
                f"temperature.target_tau = {self.target_tau:g}: ρ is steered for language models and for images with captions"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanValidationSection(ValidationSection):
    """Held-out documents: whether an anchor is nearest to its own positive, and the MLM loss."""

    num_documents: int = 256
    """Documents (from the first) that are scored. 0: all of them."""
    batch_size: int = 32
    """Documents a worker encodes at a time."""

    def __post_init__(self) -> None:
        ValidationSection.__post_init__(self)
        check_positive("validation", self, "batch_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class SentenceConfig(ContrastiveTrainingConfig):
    """Everything about one training run of a sentence encoder."""

    data: DocumentSection
    run: RunSection
    model: SentenceEncoderSection = field(default_factory=SentenceEncoderSection)
    objective: ObjectiveSection = field(default_factory=ObjectiveSection)
    temperature: DocumentTemperatureSection = field(default_factory=DocumentTemperatureSection)
    validation: SpanValidationSection = field(default_factory=SpanValidationSection)

    def __post_init__(self) -> None:
        ContrastiveTrainingConfig.__post_init__(self)
        if not self.tokenizer:
            raise ValueError("data.tokenizer is empty, and there is no model.path to take one from")

    @property
    def tokenizer(self) -> str:
        """Where the tokenizer comes from."""
        return self.data.tokenizer or self.model.path

    @property
    def is_contrastive(self) -> bool:
        """Whether sentences are compared."""
        return self.objective.contrastive_weight > 0.0

    @property
    def num_pairs_per_batch(self) -> int:
        """Anchors of a global batch, each with its positives."""
        return self.optimizer.batch_size * self.data.num_anchors


def with_absolute_paths(config: SentenceConfig) -> SentenceConfig:
    """The configuration for the workers, whose working directory is another: local paths made absolute."""
    data = dataclasses.replace(config.data, tokenizer=config.tokenizer)
    return dataclasses.replace(
        config,
        run=dataclasses.replace(config.run, storage=config.run.resolved_storage),
        data=with_absolute_fields(data, "train", "validation", "tokenizer"),
        model=with_absolute_fields(config.model, "path"),
    )
