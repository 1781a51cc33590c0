"""The KL-constrained robust loss, its derivatives in the temperature, and its exact minimiser.

For one instance with contrasting logits L_1 … L_K and positive logit L₊ (TempNet, arXiv 2404.04575, §4.1, Appendix
A-C):

    f(τ)   = τ·(logsumexp(L/τ) − log K) − L₊ + τ·ρ
    f'(τ)  = H(p) − log K + ρ,           p = softmax(L/τ)
    f''(τ) = Var_p[L] / τ³ ≥ 0

f is therefore convex in τ, and at an interior minimum the entropy is H(p) = log K − ρ. So ρ prescribes a target
entropy, and has a meaning only together with K. All functions compute in float32 at least (float64 stays float64), on
logits minus their maximum, so that L/τ never overflows and the entropy does not suffer from cancellation.

A logit of −inf (a banned or padded token) is not a contrast: it has weight 0, and K counts only the other logits of
its row, so that all results are those of the row without it. NaN and +inf are invalid; the functions that solve for a
temperature reject them.

Shapes: N rows (tokens, images), K contrasts (for a language model, the effective vocabulary).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Rows are solved in slices of about this many logits, which limits the solver's memory (in float32, 64 MiB per copy).
_MAX_LOGITS_PER_SLICE = 1 << 24
_MAX_NEWTON_STEPS = 100
# Replaces −inf after the maximum is subtracted: its weight is exactly 0 at any τ, and 0 times its square is 0, not NaN.
_FLOOR = -1e12


def rho_from_target_entropy(target_entropy: float, num_contrasts: int) -> float:
    """Return ρ = log K − H for a target entropy H in nats, 0 < H ≤ log K.

    Args:
        target_entropy: H.
        num_contrasts: K.

    Raises:
        ValueError: if H is outside (0, log K]; no feasible ρ corresponds to such an entropy.
    """
    log_k = math.log(num_contrasts)
    if not 0.0 < target_entropy <= log_k:
        raise ValueError(
            f"target_entropy = {target_entropy:g} nats is impossible with {num_contrasts} contrasts: "
            f"choose a value in (0, log {num_contrasts} = {log_k:.4f}]"
        )
    return log_k - target_entropy


def target_entropy_from_rho(rho: float, num_contrasts: int) -> float:
    """Return H = log K − ρ in nats, the entropy of softmax(L/τ*) at an interior optimum τ*.

    Args:
        rho: ρ, in nats.
        num_contrasts: K.

    Raises:
        ValueError: if ρ is infeasible, see :func:`check_rho`.
    """
    check_rho(rho, num_contrasts)
    return math.log(num_contrasts) - rho


def check_rho(rho: float, num_contrasts: int) -> None:
    """Reject a ρ outside [0, log K).

    At or above log K the constraint is never active, and every temperature would go to its lower bound.

    Args:
        rho: ρ, in nats.
        num_contrasts: K.

    Raises:
        ValueError: if ρ is infeasible; the message names ρ, K, the allowed range and what to choose.
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
    shifted = _shift_by_maximum(logits)
    tau = torch.as_tensor(tau, dtype=shifted.dtype, device=shifted.device).expand(shifted.shape[:-1])
    log_partition = torch.logsumexp(shifted / tau.unsqueeze(-1), dim=-1)
    positive = shifted.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    positive = positive.masked_fill(positive <= _FLOOR, -math.inf)
    return tau * (log_partition - _log_num_contrasts(logits, shifted.dtype) + rho) - positive


def temperature_derivatives(logits: Tensor, tau: Tensor | float, rho: float) -> tuple[Tensor, Tensor]:
    """Return the first and second derivatives of the robust loss in τ, each (N,): H(p) − log K + ρ and Var_p[L]/τ³.

    The second one equals the paper's (1/τ)·Var_p[L/τ] (TempNet Eq. 11).

    Args:
        logits: (N, K) logits; −inf for entries that are not contrasts.
        tau: (N,) temperatures or one number, τ > 0.
        rho: radius ρ of the KL ball, in nats.
    """
    shifted = _shift_by_maximum(logits)
    tau = torch.as_tensor(tau, dtype=shifted.dtype, device=shifted.device).expand(shifted.shape[:-1])
    entropy, variance = _scaled_moments(shifted, tau)
    return entropy - _log_num_contrasts(logits, shifted.dtype) + rho, variance / tau


def optimal_temperature(
    logits: Tensor, rho: float, tau_min: float = 0.001, tau_max: float = 2.0, *, tolerance: float = 1e-6
) -> Tensor:
    """Return τ*(z), the exact minimiser of the robust loss over [τ₀, τ_max]: the "oracle" (Baseline2 of TempNet).

    The solver is a Newton iteration in log τ that starts at τ = 1 and keeps a bracket of the root. A step that would
    leave the bracket, or that follows a step which did not halve the residual, is replaced by a bisection, because
    the plain iteration of the paper's Appendix B diverges on flat logits. A row whose f' does not change sign in [τ₀,
    τ_max] has its optimum at a bound: τ₀ if the logits are flat, τ_max if the prediction is nearly certain. The
    result carries no gradient; by the envelope theorem, none is needed.

    Args:
        logits: (..., K) logits; −inf for entries that are not contrasts.
        rho: radius ρ of the KL ball in nats, 0 ≤ ρ < log K for every row.
        tau_min: τ₀ > 0.
        tau_max: τ_max > τ₀.
        tolerance: residual |H(p) − log K + ρ| in nats at which a row counts as solved.

    Returns:
        (...,) in float32, or float64 for float64 logits.

    Raises:
        ValueError: if ρ is infeasible, if [τ₀, τ_max] is not an interval of positive temperatures, or if a row
            contains NaN, +inf or nothing but −inf; the message names the row.
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
    """Mean and standard deviation of τ*(ρ) over a sample of logits, from which ρ is chosen without a sweep."""

    rho: tuple[float, ...]
    """Values of ρ, in nats."""
    target_entropy: tuple[float, ...]
    """Target entropies log K − ρ, in nats; if rows have different numbers of contrasts, with the mean of log K."""
    tau_mean: tuple[float, ...]
    """Mean of τ* over the rows, for every ρ."""
    tau_std: tuple[float, ...]
    """Standard deviation of τ* over the rows, for every ρ."""


def temperature_curve(
    logits: Tensor, rhos: Sequence[float], tau_min: float = 0.001, tau_max: float = 2.0
) -> TemperatureCurve:
    """Compute the mean and the standard deviation of τ* over the rows of `logits` (N, K) for every ρ.

    The mean decreases strictly in ρ as long as some row has its optimum inside (τ₀, τ_max).

    Raises:
        ValueError: for the reasons given at :func:`optimal_temperature`.
    """
    solved = [optimal_temperature(logits, rho, tau_min, tau_max).double() for rho in rhos]
    log_k = _log_num_contrasts(logits, torch.float64).mean().item()
    return TemperatureCurve(
        rho=tuple(rhos),
        target_entropy=tuple(log_k - rho for rho in rhos),
        tau_mean=tuple(tau.mean().item() for tau in solved),
        tau_std=tuple(tau.std(unbiased=False).item() for tau in solved),
    )


def best_constant_temperature(logits: Tensor, rho: float, tau_min: float = 0.001, tau_max: float = 2.0) -> float:
    """Return the single τ in [τ₀, τ_max] that minimises the *mean* robust loss over all rows: a baseline for TempNet.

    The mean of convex functions is convex, so the root of its derivative (mean entropy − log K + ρ) is found by
    bisection in log τ.

    Raises:
        ValueError: if ρ is infeasible, or a row contains NaN, +inf or nothing but −inf.
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
    """Return τ* (n,) of one slice of rows (n, K); `first_row` is the number of the first row, for error messages."""
    shifted, targets = _checked(logits, rho, first_row)

    def residual_and_slope(rows: Tensor, targets: Tensor, log_tau: Tensor) -> tuple[Tensor, Tensor]:
        """Return f'(τ) and its derivative in log τ, which is Var_p[L/τ]."""
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
    """Return the entropy of p = softmax(L/τ) in nats and Var_p[L/τ], each (N,), for rows whose maximum is 0."""
    scaled = shifted / tau.unsqueeze(-1)
    weights = scaled.exp()
    # The maximum contributes exp(0) = 1, so the partition is at least 1. All scores are finite, so 0 · score is 0.
    partition = weights.sum(-1)
    weights = weights / partition.unsqueeze(-1)
    mean = (weights * scaled).sum(-1)
    variance = (weights * (scaled - mean.unsqueeze(-1)).square()).sum(-1)
    return partition.log() - mean, variance


def _shift_by_maximum(logits: Tensor) -> Tensor:
    """Return L − max L per row, in float32 at least, with _FLOOR in place of −inf.

    The maximum is a constant for autograd, because the gradient of f does not depend on a shift of all logits.
    """
    logits = _at_least_float32(logits)
    return (logits - logits.detach().amax(-1, keepdim=True)).clamp(min=_FLOOR)


def _log_num_contrasts(logits: Tensor, dtype: torch.dtype) -> Tensor:
    """Return log K (...,) of every row (..., V), where K is the number of logits that are not −inf."""
    return (logits > -math.inf).sum(-1).to(dtype).log()


def _checked(logits: Tensor, rho: float, first_row: int = 0) -> tuple[Tensor, Tensor]:
    """Return the shifted rows (n, V) and their target entropies log K − ρ (n,).

    Args:
        logits: (n, V).
        rho: ρ, in nats.
        first_row: number of the first row, for error messages.

    Raises:
        ValueError: if a row has no finite maximum, or ρ is infeasible for the K of a row.
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
