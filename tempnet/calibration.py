"""Choosing ρ and τ_max without a sweep (method §1, §2).

ρ. With a frozen base the oracle's mean τ*(ρ) over a sample of contexts falls in ρ, and a trained TempNet comes close to it:
the ρ whose mean τ* is the wanted one is found by root finding, before anything is trained.

τ_max at inference. τ = (τ_max − τ₀)·σ(s) + τ₀ is linear in τ_max, so over given contexts the τ_max of a wanted mean τ is
exact; over *generated* contexts, which change with τ, the step is repeated with fresh texts, and the σ of all rounds but the
first are pooled until the standard error of the mean is small enough.

Shapes: N contexts (rows), V effective vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tempnet.dro import TemperatureCurve, optimal_temperature
from tempnet.network import TempNetConfig

Rows = Callable[[], Iterable[Tensor]]
"""Called for every pass: the logits of the sample, in parts (n, V)."""

# ρ as a share of log V: the ends are infeasible (1) or have every τ* at τ_max (0).
DEFAULT_SHARES = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
_MAX_PASSES = 24


class CalibrationError(ValueError):
    """No ρ (or τ_max) gives the wanted mean temperature."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What a sample of contexts says about ρ."""

    rho: float
    """The ρ whose mean τ* is the wanted one."""
    target_entropy: float
    """log V − ρ, nats."""
    tau_mean: float
    """Mean τ* at that ρ."""
    tau_std: float
    """Standard deviation of τ* at that ρ."""
    curve: TemperatureCurve
    """Mean and spread of τ*(ρ) over a range of ρ."""
    num_contexts: int


def oracle_moments(
    rows: Rows, rhos: Sequence[float], tau_min: float, tau_max: float
) -> tuple[list[float], list[float], int]:
    """Mean and standard deviation of τ*(ρ) over the sample for every ρ, and the number of contexts; one pass."""
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


def calibrate_rho(
    rows: Rows,
    vocab_size: int,
    *,
    tau: float,
    tau_min: float = 0.001,
    tau_max: float = 2.0,
    shares: Sequence[float] = DEFAULT_SHARES,
    tolerance: float = 1e-3,
) -> Calibration:
    """The ρ at which the mean τ* over the sample is `tau`, within `tolerance`.

    The bracket comes from the curve; false position with the Illinois rule inside it, as the mean is continuous and falls.

    Raises:
        CalibrationError: if no ρ in (0, log V) reaches `tau`.
    """
    log_v = math.log(vocab_size)
    rhos = [share * log_v for share in shares]
    means, stds, num_contexts = oracle_moments(rows, rhos, tau_min, tau_max)
    curve = TemperatureCurve(
        rho=tuple(rhos),
        target_entropy=tuple(log_v - rho for rho in rhos),
        tau_mean=tuple(means),
        tau_std=tuple(stds),
    )
    if not means[-1] < tau < means[0]:
        raise CalibrationError(
            f"no rho brings the mean temperature of this model to {tau:g}: over the sample it goes from {means[0]:.3f} at "
            f"rho = {rhos[0]:.3f} to {means[-1]:.3f} at rho = {rhos[-1]:.3f}; choose a mean between, or another tau_max"
        )
    above = max(index for index, mean in enumerate(means) if mean > tau)
    low, high = rhos[above], rhos[above + 1]
    error_low, error_high = means[above] - tau, means[above + 1] - tau
    rho, mean, std = high, means[above + 1], stds[above + 1]
    for _ in range(_MAX_PASSES):
        if abs(mean - tau) <= tolerance:
            break
        rho = (low * error_high - high * error_low) / (error_high - error_low)
        was_above = mean > tau
        [mean], [std], _ = oracle_moments(rows, [rho], tau_min, tau_max)
        repeated = 0.5 if (mean > tau) == was_above else 1.0  # the end that stays is trusted less
        if mean > tau:
            low, error_low, error_high = rho, mean - tau, error_high * repeated
        else:
            high, error_high, error_low = rho, mean - tau, error_low * repeated
    return Calibration(
        rho=rho, target_entropy=log_v - rho, tau_mean=mean, tau_std=std, curve=curve, num_contexts=num_contexts
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Where temperatures lie in their range, σ = (τ − τ₀)/(τ_max − τ₀), which does not depend on τ_max."""

    mean: float
    standard_error: float
    """Of the mean, with tokens of one text taken as dependent."""

    @classmethod
    def of(cls, texts: Sequence[Tensor]) -> Share:
        """From the σ of the tokens of every text: the ratio of sums, and the spread of its residuals over texts."""
        sums = torch.tensor(
            [[text.double().sum().item(), len(text)] for text in texts if len(text)], dtype=torch.float64
        )
        total, count = sums.sum(0).tolist()
        mean = total / count
        residuals = sums[:, 0] - mean * sums[:, 1]
        num_texts = len(sums)
        variance = residuals.square().sum().item() * num_texts / max(num_texts - 1, 1) / count**2
        return cls(mean=mean, standard_error=math.sqrt(variance) if num_texts > 1 else math.inf)


def share_of_range(tau: Tensor, config: TempNetConfig) -> Tensor:
    """σ of temperatures that a network in eval mode gave."""
    tau_max = config.tau_max if config.tau_max_eval is None else config.tau_max_eval
    return (tau - config.tau_min) / (tau_max - config.tau_min)


def tau_max_for_mean(config: TempNetConfig, mean_share: float, *, wanted: float) -> float:
    """The τ_max at which contexts of this mean σ have the mean temperature `wanted`: τ₀ + (wanted − τ₀)/σ.

    Raises:
        CalibrationError: if `wanted` is not above τ₀.
    """
    if not wanted > config.tau_min:
        raise CalibrationError(f"a mean temperature of {wanted:g} is not above tau_min = {config.tau_min:g}")
    return config.tau_min + (wanted - config.tau_min) / mean_share
