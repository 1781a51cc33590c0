"""Reference implementation of the language-model losses on materialised logits, against which faster ones are tested.

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

Shapes: N tokens, V effective vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tempnet.dro import check_rho, log_num_contrasts, robust_loss, scaled_cross_entropy, temperature_derivatives
from tempnet.network import TempNet
from tempnet.oracle import optimal_temperature

IGNORE_INDEX = -100


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
    """Configuration of a language-model loss.

    Raises:
        ValueError: if the name is unknown, or tau is not positive.
    """

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


def token_temperatures(logits: Tensor, config: TemperatureLossConfig, tempnet: TempNet | None) -> Tensor:
    """Return τ (N,) of every row of `logits` (N, V); it has an autograd graph only if a TempNet predicts it."""
    source = config.kind.temperature
    if source == "tempnet":
        assert tempnet is not None, f"the loss {config.name!r} needs a TempNet"
        return tempnet(logits)
    if source == "oracle":
        return optimal_temperature(logits, config.rho, config.tau_min, config.tau_max)
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    return logits.new_full(logits.shape[:-1], config.tau if source == "given" else 1.0, dtype=dtype)


def token_losses(logits: Tensor, targets: Tensor, tau: Tensor, config: TemperatureLossConfig) -> Tensor:
    """Return the loss of every row (N,), in float32 at least; it is exactly 0 for ignored targets.

    Args:
        logits: (N, V) logits; −inf for entries that do not belong to the row's vocabulary.
        targets: (N,) int64; IGNORE_INDEX marks tokens that are not counted.
        tau: (N,) temperatures.
        config: configuration of the loss.
    """
    is_valid = targets != IGNORE_INDEX
    safe_targets = targets.where(is_valid, 0)
    if config.kind.objective == "robust":
        losses = robust_loss(logits, safe_targets, tau, config.rho)
    else:
        # The robust loss at ρ = log V equals τ times this cross-entropy, whose gradient has an additional factor 1/τ.
        losses = scaled_cross_entropy(logits, safe_targets, tau)
    if config.kind.objective == "proper":
        # τ·(cross-entropy + ρ − log V) with the token's own ρ has the value 0; only its gradients are wanted.
        level = losses.detach()
        losses = tau * (losses - level) + level
    return torch.where(is_valid, losses, 0.0)


@torch.no_grad()
def token_slopes(logits: Tensor, targets: Tensor, tau: Tensor, config: TemperatureLossConfig) -> Tensor:
    """Return ∂loss/∂τ of every row (N,).

    It is H(p) − log V + ρ for a robust loss, (H(p) − CE)/τ for a cross-entropy, H(p) − CE for the proper score, and 0 for
    ignored targets. The arguments are those of :func:`token_losses`.
    """
    if config.kind.objective == "robust":
        slopes, _ = temperature_derivatives(logits, tau, config.rho)
    else:
        derivative, _ = temperature_derivatives(logits, tau, 0.0)
        entropy = derivative + log_num_contrasts(logits, derivative.dtype)
        slopes = entropy - token_losses(logits, targets, tau, config)
        slopes = slopes if config.kind.objective == "proper" else slopes / tau
    return slopes.where(targets != IGNORE_INDEX, 0.0)


def language_model_loss(
    logits: Tensor,
    targets: Tensor,
    config: TemperatureLossConfig,
    tempnet: TempNet | None = None,
    *,
    num_targets: Tensor | float | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the loss of a batch of tokens, and the temperature of each token.

    Args:
        logits: (N, V), where V is the effective vocabulary.
        targets: (N,) int64; IGNORE_INDEX marks tokens that are not counted.
        config: configuration of the loss.
        tempnet: the temperature network, for the losses that have one.
        num_targets: divisor of the sum over tokens, which should be the number of valid targets of the *global* batch
            (all ranks, all micro-batches). By default it is the number of valid targets of this call.

    Returns:
        The scalar loss, and τ (N,).

    Raises:
        ValueError: if ρ is infeasible for this vocabulary.
    """
    if config.kind.objective == "robust":
        check_rho(config.rho, logits.shape[-1])
    tau = token_temperatures(logits, config, tempnet)
    losses = token_losses(logits, targets, tau, config)
    if num_targets is None:
        num_targets = (targets != IGNORE_INDEX).sum().clamp(min=1)
    return losses.sum() / num_targets, tau
