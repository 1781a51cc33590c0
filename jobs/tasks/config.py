"""The fields that tasks have in common: how shards are read, and the text, or the images, that are learned from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from jobs.engine.config import TrainingConfig
from jobs.engine.fields import (
    FREE_TO_CHANGE,
    PATH,
    added_later,
    check_not_negative,
    check_positive,
    check_share,
    parse_resources,
    stands_for,
    values_of,
)
from tempnet.contrastive.config import LOSS_KINDS, ContrastiveLossConfig, ContrastiveOptions, check_negatives
from tempnet.network_config import TempNetConfig, TempNetOptions

if TYPE_CHECKING:  # imports Pillow
    from pipelines.images.views import AugmentationConfig

MAX_IMAGE_SIZE = 4096
"""Largest side of an image in pixels. Such an image takes 0.2 GiB as float32, and its activations many times as much."""


@dataclass(frozen=True, kw_only=True)  # without slots, so that a class can inherit from other slotted ones too
class ReadSection:
    """How data are prepared and read."""

    max_bad_share: float = 0.01
    """Largest share of unreadable records, in [0, 1], that is tolerated; above it the run fails."""
    shuffle_window: int = 32_768
    """Number of samples (blocks, documents or pairs) within which the order is fully random; across windows only whole
    shards are permuted."""
    reader_resources: tuple[str, ...] = field(default=(), metadata=FREE_TO_CHANGE)
    """Custom Ray resources NAME=AMOUNT that every task takes that prepares data or reads them for training, such as
    reader=0.1: it then runs on nodes that were started with these resources."""
    cache_gib: float = field(default=16.0, metadata=FREE_TO_CHANGE)
    """GiB of each node's disk that hold data from an object store, in $TEMPNET_CACHE or else the directory of temporary
    files; at least two windows. 0: no cache. Local data are never cached."""

    def __post_init__(self) -> None:
        check_positive("data", self, "shuffle_window")
        check_not_negative("data", self, "cache_gib")
        check_share("data", self, "max_bad_share")
        assert self.resources is not None  # parsed here already, so that a wrong entry is refused

    @property
    def resources(self) -> dict[str, float]:
        """Custom Ray resources of reading and preparing tasks."""
        return parse_resources("data.reader_resources", self.reader_resources)


@dataclass(frozen=True, kw_only=True)
class TextSection(ReadSection):
    """The text, and how it is prepared and read."""

    train: str = field(metadata=PATH)
    """Training text: path or URI of a .jsonl.zst, .tar, .jsonl, .jsonl.gz or .parquet file, or of a directory of such
    files."""
    validation: str = field(metadata=PATH)
    """Validation text, in the same formats as `train`."""
    text_field: str = "text"
    """Name of the field (column) of a record that holds the text."""
    prepare: Literal["ahead", "streaming"] = field(default="ahead", metadata=FREE_TO_CHANGE)
    """When the training text is tokenised: ahead, before the first step, or streaming, while training runs, in the order
    in which it is visited. The batches are the same."""
    num_parts_ahead: int = field(default=16, metadata=FREE_TO_CHANGE)
    """With prepare = streaming, the number of parts of the archives (8 MiB or a member of a tar, whichever is larger)
    that may be prepared before training asks for them."""
    prepare_cpus: float = field(default=1.0, metadata=FREE_TO_CHANGE)
    """With prepare = streaming, the number of logical CPUs that Ray reserves for each preparing task."""

    def __post_init__(self) -> None:
        ReadSection.__post_init__(self)
        check_positive("data", self, "num_parts_ahead", "prepare_cpus")

    @property
    def is_streaming(self) -> bool:
        """Whether the training text is prepared while training runs."""
        return self.prepare == "streaming"

    @property
    def preparing_cpus(self) -> float:
        """Number of logical CPUs that preparing text takes while training runs."""
        return self.prepare_cpus if self.is_streaming else 0.0


@dataclass(frozen=True, kw_only=True)
class ImageSection(ReadSection):
    """The images, and how random training views are made from them."""

    train: str = field(metadata=PATH)
    """Training images: path or URI of a WebDataset tar, or of a directory of tars."""
    validation: str = field(metadata=PATH)
    """Held-out images, in the same formats as `train`."""
    key_dot: Literal["first", "last"] = field(default="first", metadata=added_later("first"))
    """Dot of a member's name in a tar at which the key of its sample ends: webdataset's is the first."""
    min_crop_scale: float = 0.5
    """Smallest share of the image's area that a random training crop covers."""
    flip_probability: float = 0.5
    """Probability of flipping a training image horizontally. Set it to 0 if captions mention left and right."""
    num_augmentations: int = 0
    """Number of RandAugment operations applied to each training image."""
    augmentation_magnitude: float = 7.0
    """Strength of the RandAugment operations, from 0 to 10."""
    num_readers: int = 1
    """Number of concurrent tasks per worker that read and decode images. Ray reserves a quarter of a CPU for each."""

    def __post_init__(self) -> None:
        ReadSection.__post_init__(self)
        check_positive("data", self, "min_crop_scale", "num_readers")
        check_share("data", self, "min_crop_scale", "flip_probability")
        check_not_negative("data", self, "num_augmentations")
        try:
            self.describe_views()
        except ValueError as error:  # only the magnitude is left to be refused
            raise ValueError(f"data.augmentation_{error}") from error

    @property
    def reading(self) -> dict[str, int]:
        """How `pipelines.stream.RankStream` reads images: decoding is slow and images are large, so that small tasks are
        shared among several readers."""
        return {"num_readers": self.num_readers, "num_batches_per_task": 8, "num_batches_per_output": 1}

    def describe_views(self, **colours: float) -> AugmentationConfig:
        """Return the configuration of random views; `colours` are its fields about colours."""
        from pipelines.images.views import AugmentationConfig

        return AugmentationConfig(
            min_scale=self.min_crop_scale,
            flip_probability=self.flip_probability,
            num_operations=self.num_augmentations,
            magnitude=self.augmentation_magnitude,
            **colours,
        )


@dataclass(frozen=True, kw_only=True)
class ImageTowerSection:
    """An image encoder: the size of its images and embeddings, and the sizes of a randomly initialised ResNet."""

    image_size: int = 224
    """Side of the square input images in pixels, at most 4 096."""
    embedding_size: int = 256
    """Dimension of the embeddings that the loss compares."""
    image_widths: tuple[int, ...] = (256, 512, 1024, 2048)
    """Number of channels of each stage of a random ResNet."""
    image_depths: tuple[int, ...] = (3, 4, 6, 3)
    """Number of blocks in each stage of a random ResNet; as many values as image_widths."""
    image_stem_width: int = 64
    """Number of channels of the stem of a random ResNet."""
    image_block: Literal["bottleneck", "basic"] = "bottleneck"
    """Type of the blocks of a random ResNet."""

    def __post_init__(self) -> None:
        check_positive("model", self, "image_size", "embedding_size", "image_stem_width")
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


@dataclass(frozen=True, slots=True, kw_only=True)
class TempNetSection(TempNetOptions):
    """Sizes and ablation switches of a TempNet, and the adjustment of ρ; each kind of task adds the loss that trains it."""

    target_tau: float | None = None
    """Mean temperature that training should reach and keep by adjusting ρ, which starts at `rho`. Must lie between τ₀
    and τ_max. Meant for joint training of base model and TempNet. ρ is constant while the TempNet rests
    (rest_share_tempnet). None: ρ is always constant."""
    rho_gain: float = 5.0
    """Gain κ of the adjustment, in nats: how far ρ moves if the mean temperature is off by a factor of e. Must be
    positive; used only with target_tau."""

    def check_steering(self, *, has_learned_rho: bool, tau_min: float, tau_max: float) -> None:
        """Check that `target_tau` and `rho_gain` are possible for the loss."""
        check_positive("temperature", self, "rho_gain")
        if self.target_tau is None:
            return
        if not has_learned_rho:
            raise ValueError(
                f"temperature.target_tau = {self.target_tau:g} steers the ρ of a robust loss with TempNets: choose "
                "temperature.loss dro (language models), tempnet or tempnet_neuclip (contrastive), or None"
            )
        if not tau_min < self.target_tau < tau_max:
            raise ValueError(
                f"temperature.target_tau = {self.target_tau:g} must lie between τ₀ = {tau_min:g} and τ_max = {tau_max:g}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ContrastiveSection(TempNetSection, ContrastiveOptions):
    """The contrastive loss, its normaliser and its temperatures (see `tempnet.contrastive.config`)."""

    loss: str = "tempnet"
    """Name of the loss: clip, clip_fixed, cyclip, sogclr, isogclr, tempnet, sogclr_given, temperature_free,
    tempnet_in_batch, fastclip_v0, fastclip_v1, fastclip_v2, fastclip_v3, siglip, neuclip or tempnet_neuclip."""
    tau: float | None = None
    """The fixed temperature, or the initial value of a learned one. None: 0.07 for losses that are normalised over the batch
    or learn one temperature (siglip: 0.1), 0.01 for the others."""
    tau_min: float | None = None
    """τ₀, the lower bound of the temperature. None: 0.01 for losses that are normalised over the batch or learn one
    temperature, 0.001 for the others."""
    tau_max: float | None = None
    """τ_max, the upper bound of the temperature. None: 1 for losses that are normalised over the batch or learn one
    temperature, 0.05 for the others. Quantiles and histograms count a τ of a table beyond τ₀ or τ_max as that bound."""
    gamma_schedule: Literal["constant", "cosine"] | None = field(
        default=None, metadata=stands_for("resolved_gamma_schedule")
    )
    """Schedule of γ. constant: always gamma. cosine: from 1 to gamma_min over the first half of training
    (arXiv 2407.01445). None: cosine for fastclip_v0 to fastclip_v3, neuclip and tempnet_neuclip, else constant."""
    phi_init: float = 0.01
    """Initial value of φ, the temperature inside the TempNet's pooling layer."""

    def __post_init__(self) -> None:
        if self.loss not in LOSS_KINDS:
            raise ValueError(f"temperature.loss = {self.loss!r} is unknown: choose one of {', '.join(LOSS_KINDS)}")
        if self.input_shift != "none":
            raise ValueError(
                f"temperature.input_shift = {self.input_shift} shifts logits, but here TempNets read embeddings: choose none"
            )
        try:
            loss = self.loss_config
        except ValueError as error:
            raise ValueError(f"temperature: {error}") from error
        has_learned_rho = self.needs_tempnets and loss.kind.uses_rho
        self.check_steering(has_learned_rho=has_learned_rho, tau_min=loss.tau_min, tau_max=loss.tau_max)

    @property
    def resolved_gamma_schedule(self) -> str:
        """The schedule of γ, or that of the loss where it is None."""
        return "cosine" if self.loss_config.has_falling_gamma else "constant"

    @property
    def needs_tempnets(self) -> bool:
        """Whether the loss takes its temperatures from TempNets."""
        return LOSS_KINDS[self.loss].temperature == "tempnet"

    @property
    def needs_prototypes(self) -> bool:
        """Whether networks of the loss begin with embeddings of training samples."""
        return self.needs_tempnets and self.projection

    @property
    def has_free_tau(self) -> bool:
        """Whether temperatures are learned from the data rather than given."""
        return LOSS_KINDS[self.loss].temperature in ("learned", "per_sample", "tempnet")

    @property
    def loss_config(self) -> ContrastiveLossConfig:
        """The configuration of the loss that this section describes."""
        bounds = {"tau_min": self.tau_min, "tau_max": self.tau_max}
        return ContrastiveLossConfig.for_name(self.loss, tau=self.tau, **bounds, **values_of(self, ContrastiveOptions))

    @property
    def tau_range(self) -> tuple[float, float]:
        """The bounds τ₀ and τ_max of the temperature."""
        loss = self.loss_config
        return loss.tau_min, loss.tau_max

    def network_config(self, embedding_size: int) -> TempNetConfig:
        """Return the configuration of a TempNet that reads embeddings of the given size."""
        low, high = self.tau_range
        options = values_of(self, TempNetOptions)
        return TempNetConfig.for_embeddings(embedding_size, rho=self.rho, tau_min=low, tau_max=high, **options)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnimodalSection(ContrastiveSection):
    """A contrastive loss on one modality (`tempnet.contrastive.unimodal`); both members of a pair share one TempNet."""

    loss: str = "clip_fixed"
    """Name of the loss: clip_fixed (NT-Xent at the fixed temperature tau), clip (one learned temperature), tempnet,
    tempnet_in_batch, temperature_free, sogclr, isogclr (one temperature for every sample), fastclip_v0, fastclip_v1,
    fastclip_v2, fastclip_v3, siglip, neuclip or tempnet_neuclip."""
    tau: float | None = 0.05
    """The fixed temperature, or the initial value of a learned one. None: 0.01 for losses normalised over all data,
    0.07 for losses normalised over the batch."""

    def __post_init__(self) -> None:
        ContrastiveSection.__post_init__(self)
        if LOSS_KINDS[self.loss].is_cyclic or LOSS_KINDS[self.loss].temperature == "given":
            raise ValueError(f"temperature.loss = {self.loss!r} is for images with captions")
        if self.target_tau is not None:
            raise ValueError(
                f"temperature.target_tau = {self.target_tau:g}: ρ is steered for language models and for images with captions"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ContrastiveTrainingConfig(TrainingConfig):
    """Configuration of a run whose loss compares all samples of a batch with one another."""

    def __post_init__(self) -> None:
        TrainingConfig.__post_init__(self)
        if self.optimizer.micro_batch_size:
            raise ValueError(
                f"optimizer.micro_batch_size = {self.optimizer.micro_batch_size}: a contrastive loss compares all samples of "
                "the batch, so that accumulating parts of it would change the loss; choose 0, and more workers or a smaller "
                "optimizer.batch_size if memory is short"
            )
        if self.workers.zero_stage == 3:
            raise ValueError(
                "workers.zero_stage = 3: encoders run one after the other within one forward pass and are small beside their "
                "activations, so dividing their weights saves next to nothing; choose 0, 1 or 2"
            )


def check_sizes(
    config: TrainingConfig,
    temperature: ContrastiveSection | None,
    *,
    num_samples: int,
    num_pairs_per_batch: int,
    noun: str,
) -> None:
    """Check that batch size, number of prototypes and ρ are possible for the size of the training data."""
    size = config.optimizer.batch_size
    if size > num_samples:
        raise ValueError(
            f"optimizer.batch_size = {size} is more than the {num_samples} {noun} of data.train: choose at most {num_samples}"
        )
    if temperature is None:
        return
    try:
        check_negatives(temperature.loss_config, num_pairs_per_batch, num_samples)
    except ValueError as error:
        raise ValueError(f"temperature.{error}") from error
    if temperature.needs_prototypes and temperature.num_prototypes > num_samples:
        raise ValueError(
            f"temperature.num_prototypes = {temperature.num_prototypes} is more than the {num_samples} training {noun} that "
            f"prototypes are made from: choose at most {num_samples}"
        )
