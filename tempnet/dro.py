"""The KL-constrained robust loss, its derivatives in the temperature, and its exact minimiser.

For one instance with contrasting logits L_1..L_K and positive logit L₊ (TempNet §4.1, Appendix A-C):

    f(τ)   = τ·(logsumexp(L/τ) − log K) − L₊ + τ·ρ
    f'(τ)  = H(p) − log K + ρ,           p = softmax(L/τ)
    f''(τ) = Var_p[L] / τ³ ≥ 0

so f is convex in τ, and at an interior minimum H(p) = log K − ρ: ρ is a target entropy, and only has a meaning together
with K. Everything here works in float32 at least (float64 stays float64) and on logits shifted by their maximum, so
that L/τ never overflows and the entropy never cancels.

A logit of −inf (a banned or padded token) is no contrast: it has weight 0, and K counts the others of its row. Every
figure is then that of the row without it. NaN and +inf have no meaning here; what solves for a temperature refuses them.

Shapes: N rows (tokens, images), K contrasts (the effective vocabulary of a language model).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Rows are solved in slices of about this many logits, which bounds the oracle's working memory (float32: 64 MiB a copy).
_MAX_LOGITS_PER_SLICE = 1 << 24
_MAX_NEWTON_STEPS = 100
# Stands for −inf after the shift by the maximum: its weight is exactly 0 at any τ, and 0 times its square is 0, not NaN.
_FLOOR = -1e12


def rho_from_target_entropy(target_entropy: float, num_contrasts: int) -> float:
    """ρ = log K − H for a target entropy H in nats, 0 < H ≤ log K.

    Raises:
        ValueError: if H lies outside (0, log K]; no ρ ≥ 0 asks for such an entropy.
    """
    log_k = math.log(num_contrasts)
    if not 0.0 < target_entropy <= log_k:
        raise ValueError(
            f"target_entropy = {target_entropy:g} nats is impossible with {num_contrasts} contrasts: "
            f"choose a value in (0, log {num_contrasts} = {log_k:.4f}]"
        )
    return log_k - target_entropy


def target_entropy_from_rho(rho: float, num_contrasts: int) -> float:
    """H = log K − ρ in nats: the entropy that softmax(L/τ*) has at an interior optimum.

    Raises:
        ValueError: if ρ is infeasible, see :func:`check_rho`.
    """
    check_rho(rho, num_contrasts)
    return math.log(num_contrasts) - rho


def check_rho(rho: float, num_contrasts: int) -> None:
    """Refuse a ρ outside [0, log K): at or above log K the constraint never binds and every τ runs to its lower bound.

    Raises:
        ValueError: naming ρ, K, the legal range and what to choose.
    """
    log_k = math.log(num_contrasts)
    if not 0.0 <= rho < log_k:
        raise ValueError(
            f"rho = {rho:g} is outside [0, log K) = [0, {log_k:.4f}) for K = {num_contrasts} contrasts (for a language "
            f"model, its effective vocabulary). rho asks for an entropy of log K − rho nats; choose rho below "
            f"{log_k:.4f}, or give target_entropy in nats instead, near the cross-entropy that the model reaches in the "
            f"middle of the run, for example target_entropy = {min(4.0, log_k / 2):.2f} "
            f"(rho = {log_k - min(4.0, log_k / 2):.2f})"
        )


def robust_loss(logits: Tensor, targets: Tensor, tau: Tensor | float, rho: float) -> Tensor:
    """f(z, τ) = τ·(logsumexp(L/τ) − log K + ρ) − L₊ for every row; differentiable in the logits and in τ.

    The gradient in the logits is softmax(L/τ) − onehot(target), without a factor 1/τ; the gradient in τ is
    H(p) − log K + ρ (TempNet Eq. 5 and Appendix B).

    Args:
        logits: (N, K), or −inf for what is no contrast.
        targets: (N,) int64, the index of the positive logit of every row.
        tau: (N,) or a number, τ > 0.
        rho: the radius of the KL ball, in nats.

    Returns:
        (N,) in float32, or float64 for float64 logits.
    """
    shifted = _shift_by_maximum(logits)
    tau = torch.as_tensor(tau, dtype=shifted.dtype, device=shifted.device).expand(shifted.shape[:-1])
    log_partition = torch.logsumexp(shifted / tau.unsqueeze(-1), dim=-1)
    positive = shifted.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    positive = positive.masked_fill(positive <= _FLOOR, -math.inf)
    return tau * (log_partition - _log_num_contrasts(logits, shifted.dtype) + rho) - positive


def temperature_derivatives(logits: Tensor, tau: Tensor | float, rho: float) -> tuple[Tensor, Tensor]:
    """The first and second derivative of the robust loss in τ, each (N,): H(p) − log K + ρ and Var_p[L]/τ³.

    The second is the paper's (1/τ)·Var_p[L/τ] (TempNet Eq. 11).
    """
    shifted = _shift_by_maximum(logits)
    tau = torch.as_tensor(tau, dtype=shifted.dtype, device=shifted.device).expand(shifted.shape[:-1])
    entropy, variance = _scaled_moments(shifted, tau)
    return entropy - _log_num_contrasts(logits, shifted.dtype) + rho, variance / tau


def optimal_temperature(
    logits: Tensor, rho: float, tau_min: float = 0.001, tau_max: float = 2.0, *, tolerance: float = 1e-6
) -> Tensor:
    """τ*(z) = argmin of the robust loss over [τ₀, τ_max], exactly: the oracle of TempNet's Baseline2.

    One Newton iteration in log τ from τ = 1, kept inside a bracket of the root: a step that leaves the bracket, or that
    follows a step which did not halve the residual, is replaced by a bisection (the plain iteration of the paper's
    Appendix B diverges on flat logits). A row whose f' does not change sign in [τ₀, τ_max] has its optimum at a bound:
    τ₀ for flat rows, τ_max for certain ones. No gradient flows: by the envelope theorem none is needed.

    Args:
        logits: (..., K), or −inf for what is no contrast.
        rho: the radius of the KL ball, 0 ≤ ρ < log K for every row.
        tau_min: τ₀ > 0.
        tau_max: τ_max > τ₀.
        tolerance: the residual |H(p) − log K + ρ| in nats at which a row is solved.

    Returns:
        (...,) in float32, or float64 for float64 logits.

    Raises:
        ValueError: for an infeasible ρ, an empty interval, or a row with NaN, +inf or nothing but −inf, which is named.
    """
    num_contrasts = logits.shape[-1]
    check_rho(rho, num_contrasts)
    if not 0.0 < tau_min < tau_max:
        raise ValueError(f"[tau_min, tau_max] = [{tau_min:g}, {tau_max:g}] is not an interval of positive temperatures")
    rows = logits.detach().reshape(-1, num_contrasts)
    num_rows_per_slice = max(1, _MAX_LOGITS_PER_SLICE // num_contrasts)
    slices = [
        _solve(part, rho, tau_min, tau_max, tolerance, first_row=index * num_rows_per_slice)
        for index, part in enumerate(rows.split(num_rows_per_slice))
    ]
    return torch.cat(slices).reshape(logits.shape[:-1]) if slices else _at_least_float32(rows).new_empty(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TemperatureCurve:
    """Mean τ*(ρ) over a sample of logits: the prior from which ρ is chosen without a sweep."""

    rho: tuple[float, ...]
    target_entropy: tuple[float, ...]
    """log K − ρ, in nats; with log K the mean over the rows where they have different numbers of contrasts."""
    tau_mean: tuple[float, ...]
    tau_std: tuple[float, ...]


def temperature_curve(
    logits: Tensor, rhos: Sequence[float], tau_min: float = 0.001, tau_max: float = 2.0
) -> TemperatureCurve:
    """Mean and spread of the oracle's τ* over the rows of `logits` (N, K) for every ρ; the mean falls strictly in ρ
    as long as some row has its optimum inside (τ₀, τ_max)."""
    solved = [optimal_temperature(logits, rho, tau_min, tau_max).double() for rho in rhos]
    log_k = _log_num_contrasts(logits, torch.float64).mean().item()
    return TemperatureCurve(
        rho=tuple(rhos),
        target_entropy=tuple(log_k - rho for rho in rhos),
        tau_mean=tuple(tau.mean().item() for tau in solved),
        tau_std=tuple(tau.std(unbiased=False).item() for tau in solved),
    )


def best_constant_temperature(logits: Tensor, rho: float, tau_min: float = 0.001, tau_max: float = 2.0) -> float:
    """The one τ that minimises the *mean* robust loss over all rows: what a TempNet has to beat.

    The mean of convex functions is convex, so its derivative (mean entropy − log K + ρ) is bisected in log τ.
    """
    shifted, targets = _checked(logits.reshape(-1, logits.shape[-1]), rho)
    target = targets.double().mean().item()

    def mean_entropy(tau: float) -> float:
        return _scaled_moments(shifted, shifted.new_full(shifted.shape[:1], tau))[0].double().mean().item()

    low, high = math.log(tau_min), math.log(tau_max)
    if mean_entropy(tau_min) >= target:
        return tau_min
    if mean_entropy(tau_max) <= target:
        return tau_max
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if mean_entropy(math.exp(middle)) >= target else (middle, high)
    return math.exp((low + high) / 2)


def _solve(logits: Tensor, rho: float, tau_min: float, tau_max: float, tolerance: float, *, first_row: int) -> Tensor:
    """The oracle for one slice of rows (n, K) → (n,)."""
    shifted, targets = _checked(logits, rho, first_row)

    def residual_and_slope(rows: Tensor, targets: Tensor, log_tau: Tensor) -> tuple[Tensor, Tensor]:
        """f'(τ) and its derivative in log τ, which is Var_p[L/τ]."""
        entropy, variance = _scaled_moments(rows, log_tau.exp())
        return entropy - targets, variance

    low = shifted.new_full(shifted.shape[:1], math.log(tau_min))
    high = torch.full_like(low, math.log(tau_max))
    at_low = residual_and_slope(shifted, targets, low)[0] >= 0
    at_high = residual_and_slope(shifted, targets, high)[0] <= 0
    tau = torch.where(at_low, tau_min, tau_max).to(shifted.dtype)

    open_rows = (~(at_low | at_high)).nonzero().squeeze(-1)
    rows, targets, low, high = shifted[open_rows], targets[open_rows], low[open_rows], high[open_rows]
    log_tau = low.clamp(min=0.0).clamp(max=math.log(tau_max))
    last_residual = torch.full_like(log_tau, math.inf)
    for _ in range(_MAX_NEWTON_STEPS):
        if open_rows.numel() == 0:
            break
        residual, slope = residual_and_slope(rows, targets, log_tau)
        tau[open_rows] = log_tau.exp()
        low = torch.where(residual < 0, log_tau, low)
        high = torch.where(residual < 0, high, log_tau)
        newton = log_tau - residual / slope
        middle = (low + high) / 2
        is_safe = (newton > low) & (newton < high) & (residual.abs() <= last_residual / 2)
        log_tau, last_residual = torch.where(is_safe, newton, middle), residual.abs()
        is_open = (last_residual > tolerance) & (high - low > 4 * torch.finfo(low.dtype).eps)
        if not is_open.all():
            keep = is_open.nonzero().squeeze(-1)
            open_rows, rows, targets, low, high = (value[keep] for value in (open_rows, rows, targets, low, high))
            log_tau, last_residual = log_tau[keep], last_residual[keep]
    return tau.clamp(tau_min, tau_max)


def _scaled_moments(shifted: Tensor, tau: Tensor) -> tuple[Tensor, Tensor]:
    """Entropy of p = softmax(L/τ) in nats and Var_p[L/τ], each (N,), for rows whose maximum is 0."""
    scaled = shifted / tau.unsqueeze(-1)
    weights = scaled.exp()
    # The maximum contributes exp(0) = 1, so the partition is at least 1 and a weight of exactly 0 meets a finite score.
    partition = weights.sum(-1)
    weights = weights / partition.unsqueeze(-1)
    mean = (weights * scaled).sum(-1)
    variance = (weights * (scaled - mean.unsqueeze(-1)).square()).sum(-1)
    return partition.log() - mean, variance


def _shift_by_maximum(logits: Tensor) -> Tensor:
    """L − max L per row, in float32 at least, and _FLOOR for −inf; the shift is a constant to autograd, as f is exactly
    covariant to it."""
    logits = _at_least_float32(logits)
    return (logits - logits.detach().amax(-1, keepdim=True)).clamp(min=_FLOOR)


def _log_num_contrasts(logits: Tensor, dtype: torch.dtype) -> Tensor:
    """log K of every row (..., V) → (...,)."""
    return (logits > -math.inf).sum(-1).to(dtype).log()


def _checked(logits: Tensor, rho: float, first_row: int = 0) -> tuple[Tensor, Tensor]:
    """Shifted rows (n, V) and their target entropies log K − ρ (n,); `first_row` is the number of the first, for messages.

    Raises:
        ValueError: for a row without a finite maximum, or a ρ that is infeasible for the K of a row.
    """
    is_bad = ~logits.amax(-1).isfinite()
    if bool(is_bad.any()):
        row = int(is_bad.nonzero()[0])
        values = logits[row]
        kind = "NaN" if bool(values.isnan().any()) else "+inf" if bool(values.isposinf().any()) else "nothing but −inf"
        raise ValueError(
            f"row {first_row + row} of the logits holds {kind}: no temperature is optimal for it. Do the model's weights, or "
            "its inputs, hold NaN?"
        )
    shifted = _shift_by_maximum(logits)
    log_k = _log_num_contrasts(logits, shifted.dtype)
    if len(log_k):
        check_rho(rho, round(math.exp(log_k.min().item())))
    return shifted, log_k - rho


def _at_least_float32(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()
