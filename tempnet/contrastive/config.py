"""Configuration of the contrastive losses.

A loss is a combination of a temperature and a normaliser:

    name               temperature     normaliser
    clip               learned         in_batch      one scalar τ, learned in log space (arXiv 2103.00020)
    clip_fixed         fixed           in_batch      the same with a constant τ
    cyclip             learned         in_batch      clip with two additional cyclic terms (arXiv 2205.14459)
    sogclr             fixed           global        a moving average of the normaliser per sample (arXiv 2202.12387)
    isogclr            per_sample      global        a separate τ per sample, learned by momentum steps (arXiv 2305.11965)
    tempnet            tempnet         global        τ predicted by a TempNet (arXiv 2404.04575)
    sogclr_given       given           global        τ of every sample from a table (for transfer)
    temperature_free   free            in_batch      logits 2·artanh(cos) without a temperature (arXiv 2501.17683)
    tempnet_in_batch   tempnet         in_batch      ablation of tempnet (TempNet Table 18)
    fastclip_v0        learned         global        sogclr with one learned τ and the loss log u (arXiv 2407.01445)
    fastclip_v1        fixed           global        sogclr; γ falls (as for all four)
    fastclip_v2        per_sample      global        isogclr
    fastclip_v3        learned         global        the robust loss with one learned τ
    siglip             learned         none          every pair by itself, log σ(±(S/τ + b)), b learned (arXiv 2303.15343)
    neuclip            learned         predicted     fastclip_v3 whose normaliser a network predicts (arXiv 2511.08417)
    tempnet_neuclip    tempnet         predicted     a TempNet's τ, and the normaliser at that τ from a network beside it
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

from tempnet.rho import check_rho


@dataclass(frozen=True, slots=True)
class LossKind:
    """Kind of loss: one row of the table in the docstring of this module."""

    temperature: Literal["fixed", "learned", "per_sample", "tempnet", "given", "free"]
    normaliser: Literal["in_batch", "global", "predicted", "none"]
    is_cyclic: bool = False
    has_falling_gamma: bool = False
    """Whether γ follows the cosine schedule unless another one is chosen."""
    is_unscaled: bool = False
    """Whether the global loss is log u, and not τ·(log u + ρ)."""

    @property
    def uses_rho(self) -> bool:
        """Whether ρ is part of the loss, which is the case if a temperature is learned by the robust loss."""
        learns_tau = self.temperature in ("learned", "per_sample", "tempnet")
        return self.objective == "robust" and not self.is_unscaled and learns_tau

    @property
    def objective(self) -> Literal["cross_entropy", "robust"]:
        """Objective that learns the temperature: in-batch cross-entropy, or the robust loss at the global estimate."""
        return "cross_entropy" if self.normaliser in ("in_batch", "none") else "robust"


LOSS_KINDS: dict[str, LossKind] = {
    "clip": LossKind("learned", "in_batch"),
    "clip_fixed": LossKind("fixed", "in_batch"),
    "cyclip": LossKind("learned", "in_batch", is_cyclic=True),
    "sogclr": LossKind("fixed", "global"),
    "isogclr": LossKind("per_sample", "global"),
    "tempnet": LossKind("tempnet", "global"),
    "sogclr_given": LossKind("given", "global"),
    "temperature_free": LossKind("free", "in_batch"),
    "tempnet_in_batch": LossKind("tempnet", "in_batch"),
    "fastclip_v0": LossKind("learned", "global", has_falling_gamma=True, is_unscaled=True),
    "fastclip_v1": LossKind("fixed", "global", has_falling_gamma=True),
    "fastclip_v2": LossKind("per_sample", "global", has_falling_gamma=True),
    "fastclip_v3": LossKind("learned", "global", has_falling_gamma=True),
    "siglip": LossKind("learned", "none"),
    "neuclip": LossKind("learned", "predicted", has_falling_gamma=True),
    "tempnet_neuclip": LossKind("tempnet", "predicted", has_falling_gamma=True),
}


@dataclass(frozen=True, kw_only=True)  # without slots, so that a class can inherit from other slotted ones too
class ContrastiveOptions:
    """Constants of the losses that do not depend on the name of the loss: what a training run lets its user choose."""

    rho: float = 8.0
    """ρ of the robust loss, the radius of the KL ball in nats; used by isogclr, tempnet, fastclip_v2, fastclip_v3, neuclip
    and tempnet_neuclip. Must be below the logarithm of the number of training samples less one, which is the number of
    negatives."""
    gamma: float = 0.8
    """Weight γ, in (0, 1], of the current batch in the moving averages u ← (1−γ)u + γ·g of the losses normalised over all
    data, where u was stored for the sample or is predicted; 1 forgets the past. A predicted u also accepts 0, which is
    NeuCLIP as published: the network alone. Used with the constant gamma_schedule."""
    gamma_schedule: Literal["constant", "cosine"] | None = None
    """Schedule of γ. constant: always gamma. cosine: from 1 to gamma_min over the first half of training
    (arXiv 2407.01445). None: cosine for fastclip_v0 to fastclip_v3, neuclip and tempnet_neuclip, else constant."""
    gamma_min: float = 0.2
    """Final value of γ with the cosine gamma_schedule, in (0, 1], or 0 for a predicted u."""
    tau_step: float = 0.03
    """Step size η of the updates τ ← Π[τ − η·m] of the per-sample temperatures of isogclr and fastclip_v2, where Π clamps
    to [τ₀, τ_max]."""
    tau_momentum: float = 0.5
    """Momentum β, in (0, 1], of the updates of the per-sample temperatures, m ← (1−β)m + β·clip(G, ±5)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContrastiveLossConfig(ContrastiveOptions):
    """Configuration of one contrastive loss; :meth:`for_name` uses the papers' temperatures.

    A field outside its range, or fields that contradict each other, raise ValueError.
    """

    name: str = "tempnet"
    """Name of the loss, one of LOSS_KINDS."""
    tau: float = 0.01
    """Fixed temperature, or the initial one if it is learned as one scalar or per sample."""
    tau_min: float = 0.001
    """Lower bound τ₀ if τ is learned as one scalar or per sample (a TempNet has its own range)."""
    tau_max: float = 0.05
    """Upper bound τ_max if τ is learned as one scalar or per sample (a TempNet has its own range)."""
    bias: float = -10.0
    """Initial value of siglip's learned b."""
    cyclic_in_modal: float = 0.25
    """Weight λ₁ of cyclip's term that compares image-image with text-text similarities."""
    cyclic_cross_modal: float = 0.25
    """Weight λ₂ of cyclip's term that compares ⟨I_j, T_k⟩ with ⟨I_k, T_j⟩."""
    tile_size: int | None = None
    """Side of the tiles of tile_size² similarities, of which memory holds four; None: a size that suits the device (see
    `tempnet.contrastive.tiles`)."""

    def __post_init__(self) -> None:
        if self.name not in LOSS_KINDS:
            raise ValueError(f"loss = {self.name!r} is unknown: choose one of {', '.join(LOSS_KINDS)}")
        if not (self.rho >= 0.0 and math.isfinite(self.rho)):
            raise ValueError(f"rho = {self.rho:g} must be finite and not negative")
        if not 0.0 < self.tau_min < self.tau_max:
            raise ValueError(f"0 < tau_min < tau_max does not hold: {self.tau_min:g}, {self.tau_max:g}")
        if not self.tau > 0.0:
            raise ValueError(f"tau = {self.tau:g} must be positive")
        if self.kind.temperature in ("learned", "per_sample") and not self.tau_min <= self.tau <= self.tau_max:
            raise ValueError(
                f"tau = {self.tau:g}, where {self.name} starts, is outside [tau_min, tau_max] = "
                f"[{self.tau_min:g}, {self.tau_max:g}]"
            )
        if self.gamma_schedule not in (None, "constant", "cosine"):
            raise ValueError(f"gamma_schedule = {self.gamma_schedule!r} is neither 'constant' nor 'cosine'")
        for field in ("gamma", "gamma_min", "tau_momentum"):
            value, may_be_0 = getattr(self, field), self.kind.normaliser == "predicted" and field != "tau_momentum"
            if not (0.0 < value <= 1.0 or (value == 0.0 and may_be_0)):
                raise ValueError(f"{field} = {value:g} must lie in {'[' if may_be_0 else '('}0, 1]")
        for field in ("tau_step", "cyclic_in_modal", "cyclic_cross_modal"):
            if not getattr(self, field) >= 0.0:
                raise ValueError(f"{field} = {getattr(self, field):g} must not be negative")
        if self.tile_size is not None and self.tile_size < 1:
            raise ValueError(f"tile_size = {self.tile_size} must be at least 1")

    @classmethod
    def for_name(cls, name: str, **changes: Any) -> ContrastiveLossConfig:
        """Return the configuration of a loss with the papers' temperatures and changes of other fields (None: the default).

        For in-batch losses, and where one τ is learned, τ starts at 0.07 (siglip: 0.1) and stays in [0.01, 1]; for the
        other global losses it starts at 0.01 and stays in [0.001, 0.05].
        """
        kind = LOSS_KINDS.get(name)
        is_wide = kind and (kind.normaliser == "in_batch" or kind.temperature == "learned")
        start = 0.1 if kind and kind.normaliser == "none" else 0.07
        wide = {"tau": start, "tau_min": 0.01, "tau_max": 1.0} if is_wide else {}
        given = {field: value for field, value in changes.items() if value is not None}
        loss = cls(name=name, **wide | given)
        if loss.kind.temperature != "fixed":
            return loss
        # the range of statistics
        return replace(loss, tau_min=min(loss.tau_min, loss.tau), tau_max=max(loss.tau_max, loss.tau))

    @property
    def kind(self) -> LossKind:
        """Temperature and normaliser that the name stands for."""
        return LOSS_KINDS[self.name]

    @property
    def has_falling_gamma(self) -> bool:
        """Whether γ follows the cosine schedule."""
        return self.gamma_schedule == "cosine" or (self.gamma_schedule is None and self.kind.has_falling_gamma)

    @property
    def state_columns(self) -> dict[str, float]:
        """Names of the values that the loss stores per sample and modality, with initial values; none if it is in-batch.

        A temperature that the caller must fill in starts as NaN.
        """
        columns = {"log_u": -math.inf} if self.kind.normaliser == "global" else {}
        if self.kind.temperature == "per_sample":
            columns |= {"tau": self.tau, "momentum": 0.0}
        if self.kind.temperature == "given":
            columns |= {"tau": math.nan}
        return columns


def gamma_at(config: ContrastiveLossConfig, step: int, num_steps: int) -> float:
    """Return γ of a training step: constant, or with the cosine schedule

        γ_min + (1 − γ_min)·½(1 + cos(π·step/(num_steps/2)))    over the first half of the training, and γ_min afterwards.

    FastCLIP's γ is constant within an epoch; this one falls with every step.
    """
    if not config.has_falling_gamma:
        return config.gamma
    progress = min(1.0, step / (num_steps / 2))
    return config.gamma_min + (1.0 - config.gamma_min) * 0.5 * (1.0 + math.cos(math.pi * progress))


def check_negatives(config: ContrastiveLossConfig, batch_size: int, num_samples: int) -> None:
    """Reject a global batch of B pairs without negatives, and a ρ that is infeasible for N training pairs.

    The moving averages of a global loss estimate a mean over all N samples, so the number of contrasts is N − 1, not
    the B − 1 of a batch. The ValueError names ρ, log(N − 1) and what to choose.
    """
    if batch_size < 2:
        raise ValueError(f"the loss {config.name} needs a global batch of at least 2 pairs, not {batch_size}")
    if not config.kind.uses_rho:
        return
    try:
        check_rho(config.rho, num_samples - 1)
    except ValueError as error:
        limit = math.log(num_samples - 1)
        raise ValueError(
            f"rho = {config.rho:g} is not below log(N − 1) = {limit:.4f} for N = {num_samples} training pairs: every "
            f"temperature of {config.name} would run to its lower bound. Choose rho below {limit:.4f}, or more than "
            f"{math.ceil(math.exp(min(config.rho, 60.0))) + 1} pairs"
        ) from error
