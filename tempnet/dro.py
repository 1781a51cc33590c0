"""The KL-constrained robust loss, its derivatives in the temperature, and what its radius ρ means.

For one instance with contrasting logits L_1 … L_K and positive logit L₊ (TempNet, arXiv 2404.04575, §4.1, Appendix
A-C):

    f(τ)   = τ·(logsumexp(L/τ) − log K) − L₊ + τ·ρ
    f'(τ)  = H(p) − log K + ρ,           p = softmax(L/τ)
    f''(τ) = Var_p[L] / τ³ ≥ 0

f is therefore convex in τ, and at an interior minimum the entropy is H(p) = log K − ρ. So ρ prescribes a target
entropy, and has a meaning only together with K. All functions compute in float32 at least (float64 stays float64), on
logits minus their maximum, so that L/τ never overflows and the entropy does not suffer from cancellation.

A logit of −inf (a banned or padded token) is not a contrast: all results are those of the row without it, also K. NaN and
+inf are invalid; the functions that solve for a temperature reject them.

Shapes: N rows (tokens, images), K contrasts (for a language model, the effective vocabulary).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Replaces −inf after the maximum is subtracted: its weight is exactly 0 at any τ, and 0 times its square is 0, not NaN.
_FLOOR = -1e12


def robust_loss(logits: Tensor, targets: Tensor, tau: Tensor | float, rho: float) -> Tensor:
    """Return f(z, τ) = τ·(logsumexp(L/τ) − log K + ρ) − L₊ for every row; it is differentiable in the logits and in τ.

    The gradient in the logits is softmax(L/τ) − onehot(target), without a factor 1/τ; the gradient in τ is
    H(p) − log K + ρ (TempNet Eq. 5 and Appendix B).

    Args:
        logits: (N, K) logits; −inf for entries that are not contrasts.
        targets: (N,) int64, the index of the positive logit of every row.
        tau: (N,) temperatures or one number, τ > 0.
        rho: radius ρ of the KL ball, in nats.

    Returns:
        (N,) in float32, or float64 for float64 logits.
    """
    log_partition, positive, tau = _partition_and_positive(logits, targets, tau)
    return tau * (log_partition - log_num_contrasts(logits, tau.dtype) + rho) - positive


def scaled_cross_entropy(logits: Tensor, targets: Tensor, tau: Tensor | float) -> Tensor:
    """Return the cross-entropy of L/τ, logsumexp(L/τ) − L₊/τ, for every row; it is differentiable in logits and τ.

    The gradient in the logits is (softmax(L/τ) − onehot(target))/τ; the gradient in τ is (H(p) − cross-entropy)/τ. Arguments
    and result are those of :func:`robust_loss`; it is inf where the positive logit is −inf.
    """
    log_partition, positive, tau = _partition_and_positive(logits, targets, tau)
    return log_partition - positive / tau


def temperature_derivatives(logits: Tensor, tau: Tensor | float, rho: float) -> tuple[Tensor, Tensor]:
    """Return the first and second derivatives of the robust loss in τ, each (N,): H(p) − log K + ρ and Var_p[L]/τ³.

    The second one equals the paper's (1/τ)·Var_p[L/τ] (TempNet Eq. 11). The arguments are those of :func:`robust_loss`.
    """
    shifted = shift_by_maximum(logits)
    tau = torch.as_tensor(tau, dtype=shifted.dtype, device=shifted.device).expand(shifted.shape[:-1])
    entropy, variance = scaled_moments(shifted, tau)
    return entropy - log_num_contrasts(logits, shifted.dtype) + rho, variance / tau


def _partition_and_positive(logits: Tensor, targets: Tensor, tau: Tensor | float) -> tuple[Tensor, Tensor, Tensor]:
    """Return logsumexp(L/τ), L₊ and τ, each (N,), for logits (N, K) from which their maximum is subtracted."""
    shifted = shift_by_maximum(logits)
    tau = torch.as_tensor(tau, dtype=shifted.dtype, device=shifted.device).expand(shifted.shape[:-1])
    log_partition = torch.logsumexp(shifted / tau.unsqueeze(-1), dim=-1)
    positive = shifted.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return log_partition, positive.masked_fill(positive <= _FLOOR, -math.inf), tau


def scaled_moments(shifted: Tensor, tau: Tensor) -> tuple[Tensor, Tensor]:
    """Return the entropy of p = softmax(L/τ) in nats and Var_p[L/τ], each (N,), for rows whose maximum is 0."""
    scaled = shifted / tau.unsqueeze(-1)
    weights = scaled.exp()
    # The maximum contributes exp(0) = 1, so the partition is at least 1. All scores are finite, so 0 · score is 0.
    partition = weights.sum(-1)
    weights = weights / partition.unsqueeze(-1)
    mean = (weights * scaled).sum(-1)
    variance = (weights * (scaled - mean.unsqueeze(-1)).square()).sum(-1)
    return partition.log() - mean, variance


def shift_by_maximum(logits: Tensor) -> Tensor:
    """Return L − max L per row, in float32 at least, with _FLOOR in place of −inf.

    The maximum is a constant for autograd, because the gradient of f does not depend on a shift of all logits.
    """
    logits = at_least_float32(logits)
    return (logits - logits.detach().amax(-1, keepdim=True)).clamp(min=_FLOOR)


def log_num_contrasts(logits: Tensor, dtype: torch.dtype) -> Tensor:
    """Return log K (...,) of every row (..., V), where K is the number of logits that are not −inf."""
    return (logits > -math.inf).sum(-1).to(dtype).log()


def at_least_float32(tensor: Tensor) -> Tensor:
    """Return the tensor in float32, or unchanged if it is in float64."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()
