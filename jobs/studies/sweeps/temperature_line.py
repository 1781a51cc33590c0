"""The line log τ̄ = a + b·value along one axis: where on the axis the mean temperature should be in the band."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from jobs.studies.sweeps.search import round_value

# Prior of d log τ̄ / dρ, per nat: what the paper's sweep found between ρ = 8 and 10.5 (TempNet Table 15: 1.65, 1.03,
# .95, .81, .69).
PRIOR_SLOPE = -0.35
# Prior fall of log τ̄ from one end to the other, as in that sweep; the only guess there is for an axis other than ρ.
PRIOR_FALL = PRIOR_SLOPE * 2.5
# Noise of log τ̄ between two trials with the same seed; a smaller difference says nothing about the direction.
_NOISE = 0.02


def log_distance(tau: float, band: tuple[float, float]) -> float:
    """Returns log τ minus the logarithm of the band's middle, which is the geometric mean of its bounds."""
    return math.log(tau) - math.log(band[0] * band[1]) / 2


def next_value(
    observations: Sequence[tuple[float, float]],
    *,
    ends: tuple[float, float],
    band: tuple[float, float],
    start: float,
    slope: float = PRIOR_SLOPE,
    is_whole: bool = False,
) -> float | None:
    """Returns the value of an axis at which the mean temperature should be in the middle of the band.

    Args:
        observations: (value, mean temperature) of the trials so far; NaN for the temperature of a failed trial.
        ends: the smallest and the largest value that may be tried.
        band: bounds of the mean temperature.
        start: the value to try first.
        slope: prior of d log τ̄ / d value, as in :func:`measure_slope`.
        is_whole: whether the value must be a whole number.

    Returns:
        the value, or None if there is nothing left to try between the ends.
    """
    low, high = ends
    known = sorted((value, log_distance(tau, band)) for value, tau in observations if tau > 0.0)
    tried = [value for value, _ in observations]
    if not known:
        # All that is known is that those points failed, so move on towards the upper end.
        candidate = start
        for _ in tried:
            candidate = (candidate + high) / 2
    elif brackets := [pair for pair in itertools.pairwise(known) if (pair[0][1] > 0.0) != (pair[1][1] > 0.0)]:
        (left, before), (right, after) = min(brackets, key=lambda pair: abs(pair[0][1]) + abs(pair[1][1]))
        # Kept away from the ends of the bracket, because observations are noisy and the temperature is flat near its
        # bounds.
        candidate = left + min(max(before / (before - after), 0.1), 0.9) * (right - left)
    else:
        nearest, distance = min(known, key=lambda observation: abs(observation[1]))
        candidate = nearest - distance / measure_slope(observations, band=band, prior=slope)
    candidate = round_value(min(max(candidate, low), high), is_whole)
    tolerance = 0.0 if is_whole else 1e-3
    return None if any(math.isclose(candidate, value, rel_tol=tolerance) for value in tried) else candidate


def measure_slope(
    observations: Sequence[tuple[float, float]], *, band: tuple[float, float], prior: float = PRIOR_SLOPE
) -> float:
    """Returns d log τ̄ / d value by the two observations nearest to the band's middle, or the prior if fewer exist.

    The prior is taken to be off by a factor of at most 4. The observations decide the sign unless their difference is
    within the noise, since in a short run the temperature may rise with ρ.

    Args:
        observations: as in :func:`next_value`.
        band: bounds of the mean temperature.
        prior: the slope that is assumed before there are observations.
    """
    known = sorted(
        ((value, log_distance(tau, band)) for value, tau in observations if tau > 0.0),
        key=lambda observation: abs(observation[1]),
    )
    if len(known) < 2:
        return prior
    (value, distance), (other_value, other_distance) = known[:2]
    measured = (other_distance - distance) / (other_value - value)
    sign = math.copysign(1.0, measured if abs(other_distance - distance) > _NOISE else prior)
    return sign * min(max(sign * measured, abs(prior) / 4), abs(prior) * 4)
