"""Which contrastive loss, and the numbers that it needs: two orthogonal choices make the whole family.

name               temperature     normaliser
clip               learned         in_batch      one scalar, learned in log space (arXiv 2103.00020)
clip_fixed         fixed           in_batch
cyclip             learned         in_batch      and the two cyclic terms (arXiv 2205.14459)
sogclr             fixed           global        a moving average per sample (arXiv 2202.12387)
isogclr            per_sample      global        momentum steps on every sample's own τ (arXiv 2305.11965)
tempnet            tempnet         global        the method (arXiv 2404.04575)
sogclr_given       given           global        τ of every sample from a table: transfer
temperature_free   free            in_batch      logits 2·artanh(cos), no temperature (arXiv 2501.17683)
tempnet_in_batch   tempnet         in_batch      ablation (TempNet Table 18)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from tempnet.dro import check_rho


@dataclass(frozen=True, slots=True)
class LossKind:
    """One row of the table above."""

    temperature: Literal["fixed", "learned", "per_sample", "tempnet", "given", "free"]
    normaliser: Literal["in_batch", "global"]
    is_cyclic: bool = False

    @property
    def uses_rho(self) -> bool:
        """ρ pulls the temperatures of the robust loss; a cross-entropy and a τ that nothing learns do without."""
        return self.normaliser == "global" and self.temperature in ("per_sample", "tempnet")

    @property
    def objective(self) -> Literal["cross_entropy", "robust"]:
        """What a temperature is learned by: the cross-entropy of a batch, or the robust loss at the global estimate."""
        return "cross_entropy" if self.normaliser == "in_batch" else "robust"


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
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ContrastiveLossConfig:
    """One loss of the family; :meth:`for_name` gives the papers' temperatures."""

    name: str = "tempnet"
    """A name of LOSS_KINDS."""
    rho: float = 8.0
    """The radius of the KL ball in nats, 0 ≤ ρ < log K, K the number of negatives; for isogclr and tempnet."""
    tau: float = 0.01
    """The fixed temperature, or the initial one where it is learned as one scalar or per sample."""
    tau_min: float = 0.001
    """τ₀, where τ is learned as one scalar or per sample (a TempNet has a range of its own)."""
    tau_max: float = 0.05
    """τ_max, likewise."""
    gamma: float = 0.8
    """γ of the moving average u ← (1−γ)u + γ·g, in (0, 1]; 1 forgets the past."""
    gamma_schedule: Literal["constant", "cosine"] = "constant"
    """`cosine` goes from 1 to gamma_min over the first half of the training (arXiv 2407.01445)."""
    gamma_min: float = 0.2
    """Where the cosine ends."""
    tau_step: float = 0.03
    """η: the step of isogclr's τ ← Π[τ − η·m]."""
    tau_momentum: float = 0.5
    """β of isogclr's m ← (1−β)m + β·clip(G, ±5)."""
    cyclic_in_modal: float = 0.25
    """λ₁: weight of the term that compares image-image with text-text similarities."""
    cyclic_cross_modal: float = 0.25
    """λ₂: weight of the term that compares ⟨I_j, T_k⟩ with ⟨I_k, T_j⟩."""
    tile_size: int | None = None
    """Similarities exist in tiles of tile_size² numbers, four at a time; None: what fits the device (`tiles`)."""

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
        if self.gamma_schedule not in ("constant", "cosine"):
            raise ValueError(f"gamma_schedule = {self.gamma_schedule!r} is neither 'constant' nor 'cosine'")
        for field in ("gamma", "gamma_min", "tau_momentum"):
            if not 0.0 < getattr(self, field) <= 1.0:
                raise ValueError(f"{field} = {getattr(self, field):g} must lie in (0, 1]")
        for field in ("tau_step", "cyclic_in_modal", "cyclic_cross_modal"):
            if not getattr(self, field) >= 0.0:
                raise ValueError(f"{field} = {getattr(self, field):g} must not be negative")
        if self.tile_size is not None and self.tile_size < 1:
            raise ValueError(f"tile_size = {self.tile_size} must be at least 1")

    @classmethod
    def for_name(cls, name: str, **changes: Any) -> ContrastiveLossConfig:
        """The papers' temperatures: in batch τ starts at 0.07 and stays in [0.01, 1]; global, 0.01 in [0.001, 0.05]."""
        kind = LOSS_KINDS.get(name)
        clip = {"tau": 0.07, "tau_min": 0.01, "tau_max": 1.0} if kind and kind.normaliser == "in_batch" else {}
        return cls(name=name, **{**clip, **changes})

    @property
    def kind(self) -> LossKind:
        """The two choices that the name stands for."""
        return LOSS_KINDS[self.name]

    @property
    def state_columns(self) -> dict[str, float]:
        """What the loss keeps of every sample and modality, and the value before the first visit: none for the in-batch
        losses. A temperature that must be filled in by the caller starts as NaN."""
        columns = {"log_u": -math.inf} if self.kind.normaliser == "global" else {}
        if self.kind.temperature == "per_sample":
            columns |= {"tau": self.tau, "momentum": 0.0}
        if self.kind.temperature == "given":
            columns |= {"tau": math.nan}
        return columns


def gamma_at(config: ContrastiveLossConfig, step: int, num_steps: int) -> float:
    """γ of a step: constant, or γ_min + (1 − γ_min)·½(1 + cos(π·step/(num_steps/2))) over the first half of the
    training and γ_min from there."""
    if config.gamma_schedule == "constant":
        return config.gamma
    progress = min(1.0, step / (num_steps / 2))
    return config.gamma_min + (1.0 - config.gamma_min) * 0.5 * (1.0 + math.cos(math.pi * progress))


def check_negatives(config: ContrastiveLossConfig, batch_size: int, num_samples: int) -> None:
    """Refuse a global batch without negatives, and a ρ that the number of contrasts makes infeasible.

    The moving averages of a global loss stand for a mean over all N samples, so that its contrasts are N − 1, not the
    B − 1 of a batch.

    Raises:
        ValueError: naming ρ, log(N − 1) and what to choose.
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
