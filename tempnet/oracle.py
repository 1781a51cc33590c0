"""The oracle: the exact minimiser τ*(z) of the robust loss, and constant temperatures to compare it with.

The formulas and their names are those of `tempnet.dro`. All functions compute in float32 at least, and reject rows
that contain NaN, +inf or nothing but −inf.

Shapes: N rows (tokens, images), K contrasts (for a language model, the effective vocabulary).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tempnet.dro import at_least_float32, log_num_contrasts, scaled_moments, shift_by_maximum
from tempnet.rho import check_rho

# Rows are solved in slices of about this many logits, which limits the solver's memory (in float32, 64 MiB per copy).
_MAX_LOGITS_PER_SLICE = 1 << 24
_MAX_NEWTON_STEPS = 100


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
        tau_min, tau_max: 0 < τ₀ < τ_max.
        tolerance: residual |H(p) − log K + ρ| in nats at which a row counts as solved.

    Returns:
        (...,) in float32, or float64 for float64 logits.

    Raises:
        ValueError: if ρ is infeasible, [τ₀, τ_max] is no interval of positive temperatures, or a row contains NaN, +inf or
            nothing but −inf; the message names the row.
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
    return torch.cat(slices).reshape(logits.shape[:-1]) if slices else at_least_float32(rows).new_empty(0)


Oracle = Callable[[Tensor, float, float, float], Tensor]
"""Function from logits, ρ, τ₀ and τ_max to the optimal temperatures."""


Rows = Callable[[], Iterable[Tensor]]
"""Function that is called once per pass over the sample; it returns the sample's logits in parts (n, V)."""


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

    @classmethod
    def of(cls, log_k: float, rhos: Sequence[float], means: Sequence[float], stds: Sequence[float]) -> TemperatureCurve:
        """Return the curve of these figures for every ρ, with log K."""
        entropies = tuple(log_k - rho for rho in rhos)
        return cls(rho=tuple(rhos), target_entropy=entropies, tau_mean=tuple(means), tau_std=tuple(stds))


def temperature_curve(
    logits: Tensor, rhos: Sequence[float], tau_min: float = 0.001, tau_max: float = 2.0
) -> TemperatureCurve:
    """Compute the mean and the standard deviation of τ* over the rows of `logits` (N, K) for every ρ.

    The mean decreases strictly in ρ as long as some row has its optimum inside (τ₀, τ_max). Errors are those of
    :func:`optimal_temperature`.
    """
    log_k = log_num_contrasts(logits, torch.float64).mean().item()
    means, deviations, _ = oracle_moments(lambda: [logits], rhos, tau_min, tau_max)
    return TemperatureCurve.of(log_k, rhos, means, deviations)


def oracle_moments(
    rows: Rows, rhos: Sequence[float], tau_min: float, tau_max: float
) -> tuple[list[float], list[float], int]:
    """Return mean and standard deviation of τ*(ρ) ∈ [τ₀, τ_max] over the sample for every ρ, and its number of contexts."""
    sums = torch.zeros(2, len(rhos), dtype=torch.float64)
    num_contexts = 0
    for logits in rows():
        num_contexts += len(logits)
        for index, rho in enumerate(rhos):
            tau = optimal_temperature(logits, rho, tau_min, tau_max).double()
            sums[0, index] += tau.sum().cpu()
            sums[1, index] += tau.square().sum().cpu()
    means, squares = sums / num_contexts
    return means.tolist(), (squares - means**2).clamp(min=0).sqrt().tolist(), num_contexts


def best_constant_temperature(logits: Tensor, rho: float, tau_min: float = 0.001, tau_max: float = 2.0) -> float:
    """Return the single τ in [τ₀, τ_max] that minimises the *mean* robust loss over all rows: a baseline for TempNet.

    The mean of convex functions is convex, so the root of its derivative (mean entropy − log K + ρ) is found in log τ. Errors
    are those of :func:`optimal_temperature`.
    """
    from scipy.optimize import brentq  # takes a third of a second

    shifted, targets = _shift_checked(logits.reshape(-1, logits.shape[-1]), rho)
    target = targets.double().mean().item()

    def slope(log_tau: float) -> float:
        tau = shifted.new_full(shifted.shape[:1], math.exp(log_tau))
        return scaled_moments(shifted, tau)[0].double().mean().item() - target

    low, high = math.log(tau_min), math.log(tau_max)
    if slope(low) >= 0.0:
        return tau_min
    return tau_max if slope(high) <= 0.0 else math.exp(brentq(slope, low, high))


def _solve(logits: Tensor, rho: float, tau_min: float, tau_max: float, tolerance: float, *, first_row: int) -> Tensor:
    """Return τ* (n,) of one slice of rows (n, K); `first_row` is the number of the first row, for error messages."""
    shifted, targets = _shift_checked(logits, rho, first_row)

    def residual_and_slope(rows: Tensor, targets: Tensor, log_tau: Tensor) -> tuple[Tensor, Tensor]:
        """Return f'(τ) and its derivative in log τ, which is Var_p[L/τ]."""
        entropy, variance = scaled_moments(rows, log_tau.exp())
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


def _shift_checked(logits: Tensor, rho: float, first_row: int = 0) -> tuple[Tensor, Tensor]:
    """Return the shifted rows (n, V) and their target entropies log K − ρ (n,).

    A row without a finite maximum, which the message numbers from `first_row`, and an infeasible ρ raise ValueError.
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
    shifted = shift_by_maximum(logits)
    log_k = log_num_contrasts(logits, shifted.dtype)
    if len(log_k):
        check_rho(rho, round(math.exp(log_k.min().item())))
    return shifted, log_k - rho
