"""What every contrastive training has of a configuration: which loss, how its temperatures come about, whole batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jobs.engine.config import SteeredTempNetSection, TrainingConfig
from tempnet.contrastive.config import LOSS_KINDS, ContrastiveLossConfig, check_negatives
from tempnet.network import TempNetConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ContrastiveSection(SteeredTempNetSection):
    """The loss, its normaliser and its temperatures (`tempnet.contrastive.config`)."""

    loss: str = "tempnet"
    """clip, clip_fixed, cyclip, sogclr, isogclr, tempnet, sogclr_given, temperature_free or tempnet_in_batch."""
    rho: float = 8.0
    """ρ in nats, below log(batch size − 1): for isogclr and tempnet."""
    tau: float | None = None
    """The fixed temperature, or where a learned one starts. None: 0.01 with a global normaliser, 0.07 in batch."""
    tau_min: float | None = None
    """τ₀. None: 0.001 with a global normaliser, 0.01 in batch."""
    tau_max: float | None = None
    """τ_max. None: 0.05 with a global normaliser, 1 in batch."""
    gamma: float = 0.8
    """γ of the moving averages of the global losses."""
    gamma_schedule: Literal["constant", "cosine"] = "constant"
    """cosine: from 1 to gamma_min over the first half of the training."""
    gamma_min: float = 0.2
    tau_step: float = 0.03
    """isogclr: step of the per-sample temperatures."""
    tau_momentum: float = 0.5
    """isogclr: momentum of the per-sample temperatures."""
    phi_init: float = 0.01
    """Initial φ of the pooling."""

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
        self.check_steering(
            has_learned_rho=self.needs_tempnets and loss.kind.uses_rho, tau_min=loss.tau_min, tau_max=loss.tau_max
        )

    @property
    def needs_tempnets(self) -> bool:
        """Whether the loss reads temperature networks."""
        return LOSS_KINDS[self.loss].temperature == "tempnet"

    @property
    def has_free_tau(self) -> bool:
        """Whether temperatures follow from the data, rather than being given."""
        return LOSS_KINDS[self.loss].temperature in ("learned", "per_sample", "tempnet")

    @property
    def loss_config(self) -> ContrastiveLossConfig:
        """The loss of this section."""
        names = ("rho", "tau", "tau_min", "tau_max", "gamma", "gamma_schedule", "gamma_min", "tau_step", "tau_momentum")
        values = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return ContrastiveLossConfig.for_name(self.loss, **values)

    @property
    def tau_range(self) -> tuple[float, float]:
        """τ₀ and τ_max."""
        loss = self.loss_config
        return loss.tau_min, loss.tau_max

    def network_config(self, embedding_size: int) -> TempNetConfig:
        """A TempNet of this section."""
        loss = self.loss_config
        return TempNetConfig.for_embeddings(
            embedding_size, rho=self.rho, tau_min=loss.tau_min, tau_max=loss.tau_max, **self.network_options
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ContrastiveTrainingConfig(TrainingConfig):
    """A run whose loss compares everything in a batch with everything."""

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
    """Refuse a batch, or prototypes, of more samples than there are, and a ρ that they make infeasible.

    Args:
        temperature: None where nothing is compared.
        num_samples: of the training data.
        noun: what they are called.

    Raises:
        ValueError: naming the field, the value and the largest that is legal.
    """
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
    if temperature.needs_tempnets and temperature.projection and temperature.num_prototypes > num_samples:
        raise ValueError(
            f"temperature.num_prototypes = {temperature.num_prototypes} is more than the {num_samples} training {noun} that "
            f"prototypes are made from: choose at most {num_samples}"
        )
