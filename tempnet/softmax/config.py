"""Configuration of the language-model losses.

A loss is a combination of a temperature and an objective (TempNet Table 4 and §6.1):

    name         temperature of a token        objective
    ce           1                             cross-entropy of L/τ
    fixed        one given τ                   cross-entropy of L/τ (`fixed_robust`: the robust loss)
    dro_newton   τ*(z), the oracle             robust loss f(z, τ)          Baseline2 of the paper
    ts_ce        TempNet                       cross-entropy of L/τ         Baseline3 of the paper, Table 18
    dro          TempNet                       robust loss f(z, τ)          the paper's method
    proper       TempNet                       proper score                 docs/method.md, "A proper score"

The proper score is the robust loss with its own ρ for every token, ρ = log V − stop_gradient(cross-entropy at τ), reported as
that cross-entropy. Its gradient in log τ is τ times that of the cross-entropy, and its gradient in the logits is p − onehot,
as that of the robust loss: no factor 1/τ weights tokens with a small τ more than others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class LossKind:
    """Kind of loss: one row of the table in the docstring of this module."""

    temperature: Literal["one", "given", "oracle", "tempnet"]
    objective: Literal["cross_entropy", "robust", "proper"]


LOSS_KINDS: dict[str, LossKind] = {
    "ce": LossKind("one", "cross_entropy"),
    "fixed": LossKind("given", "cross_entropy"),
    "fixed_robust": LossKind("given", "robust"),
    "dro_newton": LossKind("oracle", "robust"),
    "ts_ce": LossKind("tempnet", "cross_entropy"),
    "dro": LossKind("tempnet", "robust"),
    "proper": LossKind("tempnet", "proper"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TemperatureLossConfig:
    """Configuration of a language-model loss; an unknown name, or a τ that is not positive, raises ValueError."""

    name: str = "dro"
    """Name of the loss: ce, fixed, fixed_robust, dro_newton, ts_ce, dro or proper."""
    rho: float
    """Radius ρ of the KL ball in nats, 0 ≤ ρ < log V."""
    tau: float = 1.0
    """Temperature of the losses `fixed` and `fixed_robust`."""
    tau_min: float = 0.001
    """Lower bound τ₀ of the oracle's temperature."""
    tau_max: float = 2.0
    """Upper bound τ_max of the oracle's temperature."""

    def __post_init__(self) -> None:
        if self.name not in LOSS_KINDS:
            raise ValueError(f"loss = {self.name!r} is unknown: choose one of {', '.join(LOSS_KINDS)}")
        if not self.tau > 0:
            raise ValueError(f"tau = {self.tau:g} must be positive")

    @property
    def kind(self) -> LossKind:
        """Temperature and objective that the name stands for."""
        return LOSS_KINDS[self.name]
