"""The configuration of the training of a sentence encoder: its own sections, in addition to those of every run."""

from __future__ import annotations

from dataclasses import dataclass, field

from jobs.engine.config import EncoderSection, RunSection, ValidationSection
from jobs.engine.fields import PATH, added_later, check_not_negative, check_positive, check_share
from jobs.tasks.config import ContrastiveTrainingConfig, TextSection, UnimodalSection
from pipelines.sentences.spans import SpanConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentSection(TextSection, SpanConfig):
    """The documents, and how spans (anchors and their positives) are drawn from them (DeCLUTR §3.1)."""

    tokenizer: str = field(default="", metadata=PATH)
    """Directory, URI or hub name of a Transformers fast tokenizer with a mask token. If empty: that of model.path."""
    mask_share: float = 0.15
    """Share of the anchors' tokens, in [0, 1], that are masked for the masked language modelling (MLM) objective."""
    train_share: float = field(default=1.0, metadata=added_later(1.0))
    """Share of the training documents, in (0, 1], that are used: which of them, run.seed decides. They are prepared anew."""

    def __post_init__(self) -> None:
        TextSection.__post_init__(self)
        check_share("data", self, "mask_share", "train_share")
        check_positive("data", self, "train_share")
        try:
            SpanConfig.__post_init__(self)
        except ValueError as error:
            raise ValueError(f"data.{error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class SentenceEncoderSection(EncoderSection):
    """The encoder: pretrained weights to start from, or the sizes of a randomly initialised one."""

    path: str = field(default="", metadata=PATH)
    """Directory, URI or hub name of a Transformers encoder with an MLM head. If empty: a randomly initialised RoBERTa of the
    sizes below."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveSection:
    """The weights of the two losses; a weight of 0 turns a loss off."""

    contrastive_weight: float = 1.0
    """Weight of the contrastive loss between anchors and their positives. 0: no contrastive loss."""
    mlm_weight: float = 1.0
    """Weight of the loss of predicting the anchors' masked tokens (MLM). 0: no MLM."""

    def __post_init__(self) -> None:
        check_not_negative("objective", self, "contrastive_weight", "mlm_weight")
        if not (self.contrastive_weight or self.mlm_weight):
            raise ValueError("objective.contrastive_weight = objective.mlm_weight = 0 leaves nothing to learn")


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanValidationSection(ValidationSection):
    """Validation on held-out documents: whether an anchor is nearest to its own positive, and the MLM loss."""

    num_documents: int = 256
    """Number of validation documents that are scored, counted from the first. 0: all documents."""
    batch_size: int = 32
    """Number of documents that a worker encodes at a time in validation."""

    def __post_init__(self) -> None:
        ValidationSection.__post_init__(self)
        check_positive("validation", self, "batch_size")
        check_not_negative("validation", self, "num_documents")


@dataclass(frozen=True, slots=True, kw_only=True)
class SentenceConfig(ContrastiveTrainingConfig):
    """Configuration of a training run of a sentence encoder."""

    data: DocumentSection
    run: RunSection
    model: SentenceEncoderSection = field(default_factory=SentenceEncoderSection)
    objective: ObjectiveSection = field(default_factory=ObjectiveSection)
    temperature: UnimodalSection = field(default_factory=UnimodalSection)
    validation: SpanValidationSection = field(default_factory=SpanValidationSection)

    def __post_init__(self) -> None:
        ContrastiveTrainingConfig.__post_init__(self)
        if not self.tokenizer:
            raise ValueError("data.tokenizer is empty, and there is no model.path to take one from")

    @property
    def tokenizer(self) -> str:
        """Directory, URI or hub name of the tokenizer."""
        return self.data.tokenizer or self.model.path

    @property
    def is_contrastive(self) -> bool:
        """Whether the contrastive loss is used."""
        return self.objective.contrastive_weight > 0.0

    @property
    def num_pairs_per_batch(self) -> int:
        """Number of anchors in a global batch, each of which forms one pair with the mean of its positives."""
        return self.optimizer.batch_size * self.data.num_anchors
