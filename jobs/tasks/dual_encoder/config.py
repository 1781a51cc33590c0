"""The configuration of a contrastive training run: its own sections beside those of every run."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pipelines.images.views import AugmentationConfig
from tempnet.contrastive.config import LOSS_KINDS
from tempnet.models.dual_encoder import TEXT_ENCODER_DIRECTORY

from jobs.engine.config import (
    ValidationSection,
    check_not_negative,
    check_positive,
    check_share,
    with_absolute_fields,
)
from jobs.engine.contrastive import ContrastiveSection, ContrastiveTrainingConfig

MAX_IMAGE_SIZE = 4096
"""A view of this side takes .2 GiB as float32; the activations of any tower are many times as much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairDataSection:
    """Images with captions in, views and tokens out."""

    train: str
    """Training pairs: img2dataset WebDataset tars (`.jpg`, `.txt`, `.json`), one or a directory of them, path or URI."""
    validation: str
    """Validation images, each with one or several captions, for mean recall."""
    train_captions: str = ""
    """JSON with captions for `train`, in Karpathy's form or a list of {"image", "caption"}. Empty: those in the tars."""
    validation_captions: str = ""
    """The same for `validation`."""
    train_splits: tuple[str, ...] = ()
    """The splits of Karpathy's form to take. Empty: everything."""
    validation_splits: tuple[str, ...] = ()
    """The splits to take for `validation`. Empty: everything."""
    tokenizer: str = ""
    """A Transformers fast tokenizer: directory or hub name. Empty: that of the text encoder."""
    num_text_tokens: int = 30
    """Tokens a caption, padding included."""
    caption_noise: float = 0.0
    """Share of the training captions in which a word is deleted or replaced by "random" (TempNet Figure 5)."""
    min_crop_scale: float = 0.5
    """Least share of the image's area that a training crop covers."""
    flip_probability: float = 0.5
    """Horizontal flips; 0 where captions speak of left and right."""
    num_augmentations: int = 0
    """RandAugment operations an image."""
    augmentation_magnitude: float = 7.0
    """Strength of RandAugment, 0 to 10."""
    max_bad_share: float = 0.01
    """Share of samples that may be unreadable before the run fails."""
    shuffle_window: int = 32_768
    """Pairs among which the order is fully random; shards are permuted beyond it."""
    num_readers: int = 1
    """Tasks that decode images at a time, for each worker; each takes a quarter of a logical CPU from Ray's account."""

    def __post_init__(self) -> None:
        check_positive("data", self, "num_text_tokens", "shuffle_window", "num_readers")
        check_share("data", self, "max_bad_share", "caption_noise", "flip_probability")
        _ = self.augmentation

    @property
    def augmentation(self) -> AugmentationConfig:
        """How training views are drawn."""
        return AugmentationConfig(
            min_scale=self.min_crop_scale,
            flip_probability=self.flip_probability,
            num_operations=self.num_augmentations,
            magnitude=self.augmentation_magnitude,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DualEncoderSection:
    """The two towers: weights to start from, or sizes to start at random."""

    path: str = ""
    """A dual encoder to start from: an export of this job or a Transformers CLIPModel, directory or hub name."""
    freeze: bool = False
    """Train only the TempNets; the encoder stays in eval mode, without a graph. Needs a path."""
    image_path: str = ""
    """A Transformers vision model for the image tower. Empty: a random ResNet of the sizes below."""
    text_path: str = ""
    """A Transformers text encoder for the text tower. Empty: a random DistilBERT of the sizes below."""
    image_size: int = 224
    """Side of the square views, pixels; 4 096 at most."""
    embedding_size: int = 256
    """Dimension of the space both towers map into."""
    image_widths: tuple[int, ...] = (256, 512, 1024, 2048)
    """Channels of the stages of a random ResNet."""
    image_depths: tuple[int, ...] = (3, 4, 6, 3)
    """Blocks of its stages."""
    image_stem_width: int = 64
    """Channels of its stem."""
    image_block: Literal["bottleneck", "basic"] = "bottleneck"
    """Its blocks."""
    text_hidden_size: int = 768
    """Width of a random DistilBERT."""
    text_num_layers: int = 6
    text_num_heads: int = 12
    text_dropout: float = 0.1
    """Of a random DistilBERT."""
    text_attention: Literal["sdpa", "eager"] = "sdpa"
    """Transformers' attention in the text tower; eager is the faster one for captions on CPUs."""

    def __post_init__(self) -> None:
        check_positive("model", self, "image_size", "embedding_size", "image_stem_width", "text_hidden_size",
                       "text_num_layers", "text_num_heads")  # fmt: skip
        check_share("model", self, "text_dropout")
        if self.image_size > MAX_IMAGE_SIZE:
            raise ValueError(
                f"model.image_size = {self.image_size} is above {MAX_IMAGE_SIZE}: as float32, one view alone takes "
                f"{12 * self.image_size**2 / 2**30:,.1f} GiB, and a worker holds its whole share of the batch at a time"
            )
        if len(self.image_widths) != len(self.image_depths) or min(*self.image_widths, *self.image_depths) < 1:
            raise ValueError(
                f"model.image_widths = {self.image_widths} and model.image_depths = {self.image_depths} must be equally "
                "many positive numbers, one a stage"
            )
        if self.text_hidden_size % self.text_num_heads:
            raise ValueError(
                f"model.text_hidden_size = {self.text_hidden_size} is not divisible by "
                f"text_num_heads = {self.text_num_heads}"
            )
        if self.freeze and not self.path:
            raise ValueError(
                "model.freeze = True needs model.path: random towers have nothing to learn temperatures from"
            )
        if self.path and (self.image_path or self.text_path):
            raise ValueError("model.path names both towers: leave model.image_path and model.text_path empty")


@dataclass(frozen=True, slots=True, kw_only=True)
class PairTemperatureSection(ContrastiveSection):
    """The loss, its normaliser and its temperatures (`tempnet.contrastive.config`); both TempNets are alike."""

    table: str = ""
    """sogclr_given: temperatures of the training pairs, as `jobs.predict_temperatures` writes them."""

    def __post_init__(self) -> None:
        ContrastiveSection.__post_init__(self)
        if (LOSS_KINDS[self.loss].temperature == "given") != bool(self.table):
            raise ValueError(
                f"temperature.table = {self.table!r} with temperature.loss = {self.loss!r}: the loss sogclr_given needs a "
                "table, and no other loss takes one"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrievalValidationSection(ValidationSection):
    """Mean recall on held-out images and their captions; the best model is the one that is exported."""

    num_images: int = 0
    """Images (from the first) that are scored, with all their captions. 0: all of them."""
    batch_size: int = 256
    """Images (captions) a worker encodes at a time."""

    def __post_init__(self) -> None:
        ValidationSection.__post_init__(self)
        check_positive("validation", self, "batch_size")
        check_not_negative("validation", self, "num_images")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipConfig(ContrastiveTrainingConfig):
    """Everything about one training run of a dual encoder and its temperatures."""

    data: PairDataSection
    model: DualEncoderSection = field(default_factory=DualEncoderSection)
    temperature: PairTemperatureSection = field(default_factory=PairTemperatureSection)
    validation: RetrievalValidationSection = field(default_factory=RetrievalValidationSection)

    def __post_init__(self) -> None:
        ContrastiveTrainingConfig.__post_init__(self)
        if self.model.freeze and not self.temperature.needs_tempnets:
            raise ValueError(
                f"model.freeze = True leaves nothing to train with temperature.loss = {self.temperature.loss!r}: "
                "choose tempnet or tempnet_in_batch"
            )
        if not self.tokenizer:
            raise ValueError("data.tokenizer is empty, and there is no model.path or model.text_path to take one from")

    @property
    def tokenizer(self) -> str:
        """Where the tokenizer comes from; that of an exported dual encoder lies with its text tower."""
        beside_text_tower = Path(self.model.path) / TEXT_ENCODER_DIRECTORY
        of_model = str(beside_text_tower) if self.model.path and beside_text_tower.is_dir() else self.model.path
        return self.data.tokenizer or self.model.text_path or of_model


def with_absolute_paths(config: ClipConfig) -> ClipConfig:
    """The configuration for the workers, whose working directory is another: local paths made absolute."""
    data = dataclasses.replace(config.data, tokenizer=config.tokenizer)
    paths = ("train", "validation", "train_captions", "validation_captions", "tokenizer")
    return dataclasses.replace(
        config,
        run=dataclasses.replace(config.run, storage=config.run.resolved_storage),
        data=with_absolute_fields(data, *paths),
        model=with_absolute_fields(config.model, "path", "image_path", "text_path"),
        temperature=with_absolute_fields(config.temperature, "table"),
    )
