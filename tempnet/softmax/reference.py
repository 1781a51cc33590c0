"""Reference implementation of the language-model losses on materialised logits, against which faster ones are tested.

The losses are those of `tempnet.softmax.config`.

Shapes: N tokens, V effective vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tempnet.dro import log_num_contrasts, robust_loss, scaled_cross_entropy, temperature_derivatives
from tempnet.network import TempNet
from tempnet.oracle import optimal_temperature
from tempnet.rho import check_rho
from tempnet.softmax.config import TemperatureLossConfig

IGNORE_INDEX = -100


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

    Logits (N, V) are −inf for entries that do not belong to the row's vocabulary. Targets (N,) are int64, or IGNORE_INDEX.
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
    """Compute the loss of a batch of tokens, a scalar, and the temperature of each token (N,).

    Args:
        logits: (N, V), where V is the effective vocabulary; ValueError if ρ is infeasible for it.
        targets: (N,) int64; IGNORE_INDEX marks tokens that are not counted.
        config, tempnet: configuration of the loss, and the temperature network of one that has it.
        num_targets: divisor of the sum over tokens, which should be the number of valid targets of the *global* batch
            (all ranks, all micro-batches). By default it is the number of valid targets of this call.
    """
    if config.kind.objective == "robust":
        check_rho(config.rho, logits.shape[-1])
    tau = token_temperatures(logits, config, tempnet)
    losses = token_losses(logits, targets, tau, config)
    if num_targets is None:
        num_targets = (targets != IGNORE_INDEX).sum().clamp(min=1)
    return losses.sum() / num_targets, tau
