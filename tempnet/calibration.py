"""Choose ρ and τ_max without a sweep (docs/method.md, "Choosing ρ for a frozen model").

ρ: With a frozen base model, the mean of the optimal temperature τ*(ρ) over a sample of contexts decreases in ρ, and
the mean temperature of a trained TempNet comes close to it. The ρ for a desired mean τ* is therefore found by root finding.

τ_max at inference: τ = (τ_max − τ₀)·σ(s) + τ₀ is linear in τ_max, so for given contexts the τ_max that gives a
desired mean τ is exact. *Generated* contexts change with τ, so for them the step is repeated with newly generated
texts, and the σ(s) of all rounds but the first are pooled until the standard error of their mean is small enough.

Shapes: N contexts (rows), V effective vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tempnet.intervals import ratio_error
from tempnet.network_config import TempNetConfig
from tempnet.oracle import Rows, TemperatureCurve, oracle_moments

# Values of ρ as fractions of log V. The ends are left out: 1 is infeasible, and 0 puts every τ* at τ_max.
_SHARES = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
_TOLERANCE = 1e-3
_MAX_PASSES = 24


class CalibrationError(ValueError):
    """Raised if no ρ (or τ_max) gives the desired mean temperature."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Result of choosing ρ from a sample of contexts."""

    rho: float
    """The ρ at which the mean τ* is the desired one, in nats."""
    target_entropy: float
    """Target entropy log V − ρ, in nats."""
    tau_mean: float
    """Mean τ* at that ρ."""
    tau_std: float
    """Standard deviation of τ* at that ρ."""
    curve: TemperatureCurve
    """Mean and standard deviation of τ*(ρ) over a range of ρ."""
    num_contexts: int
    """Number of contexts in the sample."""


def calibrate_rho(
    rows: Rows,
    vocab_size: int,
    *,
    tau: float,
    tau_min: float = 0.001,
    tau_max: float = 2.0,
) -> Calibration:
    """Find the ρ at which the mean τ* over the sample is `tau`, up to 1e-3, for τ* in [τ₀, τ_max].

    The curve of mean temperatures at some shares of log V gives a bracket, in which Brent's method finds the root. A `tau`
    outside the range of means that the curve covers raises CalibrationError.
    """
    from scipy.optimize import brentq  # takes a third of a second, which only a calibration needs

    log_v = math.log(vocab_size)
    rhos = [share * log_v for share in _SHARES]
    means, stds, num_contexts = oracle_moments(rows, rhos, tau_min, tau_max)
    curve = TemperatureCurve.of(log_v, rhos, means, stds)
    if not means[-1] < tau < means[0]:
        raise CalibrationError(
            f"no rho brings the mean temperature of this model to {tau:g}: over the sample it goes from {means[0]:.3f} at "
            f"rho = {rhos[0]:.3f} to {means[-1]:.3f} at rho = {rhos[-1]:.3f}; choose a mean between, or another tau_max"
        )
    known = dict(zip(rhos, zip(means, stds, strict=True), strict=True))

    def error(rho: float) -> float:
        if rho not in known:
            [mean], [std], _ = oracle_moments(rows, [rho], tau_min, tau_max)
            known[rho] = mean, std
        difference = known[rho][0] - tau
        return 0.0 if abs(difference) <= _TOLERANCE else difference

    above = max(index for index, mean in enumerate(means) if mean > tau)
    rho = brentq(error, rhos[above], rhos[above + 1], maxiter=_MAX_PASSES, disp=False)
    mean, std = known[rho]
    return Calibration(
        rho=rho, target_entropy=log_v - rho, tau_mean=mean, tau_std=std, curve=curve, num_contexts=num_contexts
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Mean relative position of temperatures in their range, σ = (τ − τ₀)/(τ_max − τ₀); it is independent of τ_max."""

    mean: float
    """Mean σ over all tokens, in [0, 1]."""
    standard_error: float
    """Standard error of the mean, where the tokens of one text are treated as dependent."""

    @classmethod
    def of(cls, texts: Sequence[Tensor]) -> Share:
        """Estimate both from the σ of the tokens of each text: a ratio of sums over texts, and the residuals of the texts."""
        sums = torch.tensor([[text.double().sum().item(), len(text)] for text in texts], dtype=torch.float64)
        mean, error, _ = ratio_error(sums[:, 0], sums[:, 1])
        return cls(mean=mean, standard_error=math.inf if math.isnan(error) else error)


def share_of_range(tau: Tensor, config: TempNetConfig) -> Tensor:
    """Return the relative positions σ of temperatures that a network in eval mode predicted."""
    tau_max = config.inference_tau_max
    return (tau - config.tau_min) / (tau_max - config.tau_min)


def tau_max_for_mean(config: TempNetConfig, mean_share: float, *, wanted: float) -> float:
    """Return the τ_max at which contexts of mean σ have the mean temperature `wanted`: τ₀ + (wanted − τ₀)/σ.

    A wanted mean that is not above τ₀ raises CalibrationError.
    """
    if not wanted > config.tau_min:
        raise CalibrationError(f"a mean temperature of {wanted:g} is not above tau_min = {config.tau_min:g}")
    return config.tau_min + (wanted - config.tau_min) / mean_share
