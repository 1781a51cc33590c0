"""The configuration of the training of an image encoder: its own sections, in addition to those of every run."""

from __future__ import annotations

from dataclasses import dataclass, field

from jobs.engine.config import ValidationSection
from jobs.engine.fields import PATH, check_not_negative, check_positive, check_share
from jobs.tasks.config import ContrastiveTrainingConfig, ImageSection, ImageTowerSection, UnimodalSection
from pipelines.images.views import AugmentationConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledImageSection(ImageSection):
    """The images, their classes, which only the linear probe reads, and how the two views of an image are made."""

    label: str = "folder"
    """Where the class of an image stands. folder: the last folder of its path, in tars or in a directory of images; cls: the
    .cls beside it in a WebDataset tar; any other name: that field of the .json beside it."""
    colour_jitter: float = 0.5
    """Strength of SimCLR's change of colours, in [0, 1], which four of five views have."""
    grey_probability: float = 0.2
    """Probability that a view is grey."""

    def __post_init__(self) -> None:
        ImageSection.__post_init__(self)
        check_share("data", self, "colour_jitter", "grey_probability")
        if not self.label:
            raise ValueError("data.label is empty: give folder, cls, or the name of a field of the .json")

    @property
    def augmentation(self) -> AugmentationConfig:
        """The configuration of the random views."""
        return self.describe_views(colour_jitter=self.colour_jitter, grey_probability=self.grey_probability)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageEncoderSection(ImageTowerSection):
    """The encoder: pretrained weights to start from, or the sizes of a randomly initialised ResNet."""

    path: str = field(default="", metadata=PATH)
    """Directory, URI or hub name of a Transformers vision model. If empty: a randomly initialised ResNet of the sizes
    image_widths to image_block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeSection(ValidationSection):
    """Validation by a linear probe: a classifier on frozen features of training images, scored on held-out ones."""

    num_train_images: int = 0
    """Number of training images, drawn at random, that the probe is fitted to. 0: all."""
    num_images: int = 0
    """Number of held-out images, drawn at random, that it is scored on. 0: all."""
    regularisation: float = 1.0
    """Inverse strength C of the probe's L2 regularisation, as in scikit-learn; features are standardised."""
    batch_size: int = 256
    """Number of images that a worker encodes at a time in validation."""

    def __post_init__(self) -> None:
        ValidationSection.__post_init__(self)
        check_positive("validation", self, "regularisation", "batch_size")
        check_not_negative("validation", self, "num_train_images", "num_images")


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageEncoderConfig(ContrastiveTrainingConfig):
    """Configuration of a training run of an image encoder."""

    data: LabelledImageSection
    model: ImageEncoderSection = field(default_factory=ImageEncoderSection)
    temperature: UnimodalSection = field(default_factory=UnimodalSection)
    validation: ProbeSection = field(default_factory=ProbeSection)
