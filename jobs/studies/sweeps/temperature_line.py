"""The line log τ̄ = a + b·value along one axis: where on the axis the mean temperature should be in the band."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from jobs.studies.sweeps.search import round_value

# Prior of d log τ̄ / dρ, per nat: what the paper's sweep found between ρ = 8 and 10.5 (TempNet Table 15: 1.65, 1.03,
# .95, .81, .69). With PRIOR_FALL over the axis in its place 8 points fewer of the searches on the recorded grid of
# language models come within .5 % of its best (measured at 289c795).
PRIOR_SLOPE = -0.35
# Prior fall of log τ̄ from one end to the other, as in that sweep; the only guess there is for an axis other than ρ. With
# PRIOR_SLOPE 35 points fewer of the searches along such an axis reach the band (measured at 289c795).
PRIOR_FALL = PRIOR_SLOPE * 2.5
# Noise of log τ̄ between two trials with the same seed; a smaller difference says nothing about the direction. Two of
# three real searches from far away saw .987 and .981 or .974 first, and would have turned round (measured at 289c795).
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

    Between two neighbouring observations on both sides of the middle it interpolates. Otherwise it extrapolates from the
    nearest observation, with the slope of the two nearest. If their difference is within the noise, it takes the prior's
    slope, from the one of them that lies farthest in its direction. The slope may have either sign, since in a short run
    the temperature may rise with ρ: with the prior alone 17 points fewer of the searches on recorded dual encoders come
    within .5 % of the grid's best (measured at 289c795).

    Args:
        observations: (value, mean temperature) of the trials so far; NaN for the temperature of a failed trial.
        ends: the smallest and the largest value that may be tried.
        band: bounds of the mean temperature.
        start: the value to try first.
        slope: prior of d log τ̄ / d value, for fewer than two observations.
        is_whole: whether the value must be a whole number.

    Returns:
        the value, or None if there is nothing left to try between the ends.
    """
    low, high = ends
    known = sorted((value, log_distance(tau, band)) for value, tau in observations if tau > 0.0)
    tried = [value for value, _ in observations]
    if not known:
        # All that is known is that those points failed, so move on towards the upper end. If a quarter of the points
        # fail, 16 points fewer of the searches reach the band without this (measured at 289c795).
        candidate = start
        for _ in tried:
            candidate = (candidate + high) / 2
    elif brackets := [pair for pair in itertools.pairwise(known) if (pair[0][1] > 0.0) != (pair[1][1] > 0.0)]:
        (left, before), (right, after) = min(brackets, key=lambda pair: abs(pair[0][1]) + abs(pair[1][1]))
        candidate = left + before / (before - after) * (right - left)
    else:
        (nearest, distance), *others = sorted(known, key=lambda observation: abs(observation[1]))
        if others and abs(others[0][1] - distance) > _NOISE:
            slope = (others[0][1] - distance) / (others[0][0] - nearest)
        else:
            # Trials that only noise tells apart are equally near: go on from the one that lies farthest on the way.
            alike = [observation for observation in known if abs(observation[1] - distance) <= _NOISE]
            nearest, distance = max(alike, key=lambda observation: -observation[0] * distance / slope)
        candidate = nearest - distance / slope
    candidate = round_value(min(max(candidate, low), high), is_whole)
    tolerance = 0.0 if is_whole else 1e-3
    return None if any(math.isclose(candidate, value, rel_tol=tolerance) for value in tried) else candidate
