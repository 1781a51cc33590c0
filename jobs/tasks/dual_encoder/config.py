"""The configuration of the training of a dual encoder: its own sections, in addition to those of every run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from jobs.engine.config import ValidationSection
from jobs.engine.fields import PATH, added_later, check_not_negative, check_positive, check_share
from jobs.tasks.config import ContrastiveSection, ContrastiveTrainingConfig, ImageSection, ImageTowerSection
from pipelines.images.views import AugmentationConfig
from pipelines.local_copy import is_directory
from pipelines.storage import join
from tempnet.contrastive.config import LOSS_KINDS
from tempnet.models.dual_encoder_config import TEXT_ENCODER_DIRECTORY


@dataclass(frozen=True, slots=True, kw_only=True)
class PairDataSection(ImageSection):
    """The images and captions, and how training views (augmented images) and tokens are made from them."""

    train: str = field(metadata=PATH)
    """Training pairs: path or URI of an img2dataset WebDataset tar (`.jpg`, `.txt`, `.json`), or of a directory of tars."""
    validation: str = field(metadata=PATH)
    """Validation images, each with one or several captions, in the same formats as `train`."""
    train_captions: str = field(default="", metadata=PATH)
    """JSON file with the captions of `train`, in Karpathy's format or as a list of {"image", "caption"}. If empty: the
    captions in the tars."""
    validation_captions: str = field(default="", metadata=PATH)
    """JSON file with the captions of `validation`, in the same formats. If empty: the captions in the tars."""
    train_splits: tuple[str, ...] = ()
    """Splits of train_captions (Karpathy's format) to use. If empty: all."""
    validation_splits: tuple[str, ...] = ()
    """Splits of validation_captions (Karpathy's format) to use. If empty: all."""
    tokenizer: str = field(default="", metadata=PATH)
    """Directory, URI or hub name of a Transformers fast tokenizer. If empty: the tokenizer of the text encoder."""
    num_text_tokens: int = 30
    """Number of tokens of a caption, including padding; longer captions are truncated."""
    caption_noise: float = 0.0
    """Share of the training captions, in [0, 1], in which a word is deleted or replaced by "random" (TempNet Figure 5)."""
    view: Literal["random", "central"] = field(default="random", metadata=added_later("random"))
    """What training sees of an image. random: a random crop, which may be flipped and changed, another one in every epoch;
    min_crop_scale and the fields after it describe it. central: the central square of the resized image, as in validation,
    in every epoch."""

    def __post_init__(self) -> None:
        ImageSection.__post_init__(self)
        check_positive("data", self, "num_text_tokens")
        check_share("data", self, "caption_noise")

    @property
    def augmentation(self) -> AugmentationConfig | None:
        """The configuration of the random augmentation of training images; None with the central view."""
        return self.describe_views() if self.view == "random" else None


@dataclass(frozen=True, slots=True, kw_only=True)
class DualEncoderSection(ImageTowerSection):
    """The two encoders (towers): pretrained weights to start from, or the sizes of randomly initialised ones."""

    path: str = field(default="", metadata=PATH)
    """Directory, URI or hub name of a dual encoder to start from: an export of this job, or a Transformers CLIPModel. If
    empty: the towers are given by image_path and text_path, or randomly initialised."""
    freeze: bool = False
    """Train only the TempNets and keep the dual encoder fixed, in eval mode and without gradients. Needs `path`."""
    features: bool = field(default=False, metadata=added_later(False))
    """Read the embeddings of frozen towers that `jobs.prepare_features` has stored, instead of images and towers. Needs
    `freeze` and the central view (data.view)."""
    image_path: str = field(default="", metadata=PATH)
    """Directory, URI or hub name of a Transformers vision model for the image tower. If empty: a randomly initialised ResNet
    of the sizes image_widths to image_block."""
    text_path: str = field(default="", metadata=PATH)
    """Directory, URI or hub name of a Transformers text encoder for the text tower. If empty: a randomly initialised
    DistilBERT of the sizes below."""
    text_hidden_size: int = 768
    """Hidden size of a random DistilBERT; must be a multiple of text_num_heads."""
    text_num_layers: int = 6
    """Number of layers of a random DistilBERT."""
    text_num_heads: int = 12
    """Number of attention heads of a random DistilBERT."""
    text_dropout: float = 0.1
    """Dropout probability of a random DistilBERT."""
    text_attention: Literal["sdpa", "eager"] = "sdpa"
    """Attention implementation of Transformers in the text tower. `eager` is the faster one for captions on CPUs."""

    def __post_init__(self) -> None:
        ImageTowerSection.__post_init__(self)
        check_positive("model", self, "text_hidden_size", "text_num_layers", "text_num_heads")
        check_share("model", self, "text_dropout")
        if not (self.path or self.text_path) and self.text_hidden_size % self.text_num_heads:
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
    """The loss, its normaliser and its temperatures (`tempnet.contrastive.config`).

    The TempNets for images and texts have the same configuration.
    """

    table: str = field(default="", metadata=PATH)
    """Table with the temperatures of the training pairs, as `jobs.predict_temperatures` writes it. Required by the loss
    sogclr_given; other losses do not accept one."""

    @property
    def needs_prototypes(self) -> bool:
        """Whether networks of the loss begin with embeddings of training samples."""
        predicts = LOSS_KINDS[self.loss].normaliser == "predicted"
        return predicts or (self.needs_tempnets and self.projection)

    def __post_init__(self) -> None:
        ContrastiveSection.__post_init__(self)
        if (LOSS_KINDS[self.loss].temperature == "given") != bool(self.table):
            raise ValueError(
                f"temperature.table = {self.table!r} with temperature.loss = {self.loss!r}: the loss sogclr_given needs a "
                "table, and no other loss takes one"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrievalValidationSection(ValidationSection):
    """Validation by mean recall on held-out images and their captions; the model with the best mean recall is exported."""

    num_images: int = 0
    """Number of validation images, counted from the first, that are scored with all their captions. 0: all images."""
    batch_size: int = 256
    """Number of images (or captions) that a worker encodes at a time in validation."""

    def __post_init__(self) -> None:
        ValidationSection.__post_init__(self)
        check_positive("validation", self, "batch_size")
        check_not_negative("validation", self, "num_images")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipConfig(ContrastiveTrainingConfig):
    """Configuration of a training run of a dual encoder and its temperatures."""

    data: PairDataSection
    model: DualEncoderSection = field(default_factory=DualEncoderSection)
    temperature: PairTemperatureSection = field(default_factory=PairTemperatureSection)
    validation: RetrievalValidationSection = field(default_factory=RetrievalValidationSection)

    def __post_init__(self) -> None:
        ContrastiveTrainingConfig.__post_init__(self)
        if self.model.freeze and self.workers.activation_checkpointing:
            raise ValueError(
                "workers.activation_checkpointing = True saves the memory of the encoder's backward pass, which a frozen one "
                "(model.freeze) does not have: choose False"
            )
        if self.model.freeze and not self.temperature.needs_tempnets:
            raise ValueError(
                f"model.freeze = True leaves nothing to train with temperature.loss = {self.temperature.loss!r}: "
                "choose tempnet, tempnet_in_batch or tempnet_neuclip"
            )
        if self.model.features and not self.model.freeze:
            raise ValueError(
                "model.features = True needs model.freeze True: the embeddings of towers that are trained change"
            )
        if self.model.features and self.data.view != "central":
            raise ValueError(
                f"model.features = True reads one stored embedding of every image, but data.view = {self.data.view!r} shows "
                "another crop of it in every epoch: choose data.view central, or train on the towers (model.features False)"
            )
        if not (self.data.tokenizer or self.model.text_path or self.model.path):
            raise ValueError("data.tokenizer is empty, and there is no model.path or model.text_path to take one from")

    @property
    def trains_networks_alone(self) -> bool:
        """Whether the towers are frozen, so that only TempNets are trained."""
        return self.model.freeze

    @property
    def tokenizer(self) -> str:
        """Directory, URI or hub name of the tokenizer; an exported dual encoder keeps it beside its text tower."""
        if given := self.data.tokenizer or self.model.text_path:
            return given
        beside_text_tower = join(self.model.path, TEXT_ENCODER_DIRECTORY)
        return beside_text_tower if is_directory(beside_text_tower) else self.model.path
