"""The searches of a sweep: rounds of points, in which a round may be chosen from the results of the previous ones.

A search is a generator: it yields the points of a round and is sent their results. It depends on nothing else, so a
sweep that was interrupted repeats the same search, and finds the finished trials in their directories.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

Point: TypeAlias = dict[str, float]
"""Field → value."""
Axes: TypeAlias = Mapping[str, Sequence[float]]
"""Field → its values. Searches that also try values in between use the smallest and the largest as ends."""

# Prior of d log τ̄ / dρ, per nat: what the paper's sweep found between ρ = 8 and 10.5 (TempNet Table 15: 1.65, 1.03,
# .95, .81, .69).
PRIOR_SLOPE = -0.35
# Prior fall of log τ̄ from one end to the other, as in that sweep; the only guess there is for an axis other than ρ.
PRIOR_FALL = PRIOR_SLOPE * 2.5
# Noise of log τ̄ between two trials with the same seed; a smaller difference says nothing about the direction.
_NOISE = 0.02
# Relative difference in loss below which two trials count as equally good.
_TIE = 1e-3
_NUM_DIGITS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """The result of a point."""

    point: Point
    tau_mean: float
    """Mean temperature of the last validation; NaN if the trial failed."""
    loss: float
    """Validation loss, in nats; NaN if the trial failed."""
    share: float
    """Share of its steps that the trial ran for: 1 if it was not stopped early, and also if it failed."""

    def is_in(self, band: tuple[float, float]) -> bool:
        """Returns whether the trial ran for all its steps and ended in the band."""
        return self.share == 1.0 and band[0] <= self.tau_mean <= band[1]


Search: TypeAlias = Generator[list[Point], list[Seen], None]


def grid(axes: Axes) -> Search:
    """Yields every combination of the values, in one round."""
    yield [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def corners(axes: Axes) -> list[Point]:
    """Returns every combination of the axes' ends; if a point in between is invalid, one of these is too."""
    ends = [{min(values), max(values)} for values in axes.values()]
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*ends)]


def random(axes: Axes, *, num_trials: int, seed: int, whole: Collection[str] = ()) -> Search:
    """Yields `num_trials` random points between the ends of the axes, in one round.

    Values are drawn log-uniformly if the larger end is at least 10 times the smaller, else uniformly. Points that are
    drawn again are left out.

    Args:
        axes: the axes.
        num_trials: number of points to draw.
        seed: random seed.
        whole: names of the axes whose values are whole numbers.
    """
    rng = np.random.default_rng(seed)
    drawn = [{name: _drawn(values, rng, name in whole) for name, values in axes.items()} for _ in range(num_trials)]
    yield [point for number, point in enumerate(drawn) if point not in drawn[:number]]


def band(
    axes: Axes,
    *,
    band: tuple[float, float],
    budget: float,
    start: float | None = None,
    slope: float = PRIOR_SLOPE,
    whole: Collection[str] = (),
) -> Search:
    """Searches the first axis for the value that brings the mean temperature into the band, then the other axes there.

    The mean temperature is expected to fall along the first axis (such as ρ). The search tries `start` on it, with the
    middle values of all other axes. Then it follows the line log τ̄ = a + b·ρ: each observation shifts it, and its
    slope is the prior until two observations measure it. Once observations lie on both sides of the middle of the band,
    it interpolates between them. If the first axis's ends do not reach the band, values of the other axes are tried
    from there.

    When a whole trial has ended in the band, combinations of the other axes compete there in one round, of which the
    better ones run to the end (`jobs.studies.sweeps.stopping`). The rest of the budget continues from the best trial.
    Neighbouring combinations that the round had no room for come first, as the loss may still fall there; the first
    axis is set to the value that should bring them to the middle of the band. If there are none, values of the first
    axis follow that should lead to the end of the band where the loss has been lower.

    Args:
        axes: the axes; the first one is the axis that moves the mean temperature.
        band: bounds of the mean temperature.
        budget: number of steps in whole trials; never exceeded.
        start: first value to try on the first axis; None: its middle.
        slope: prior of d log τ̄ / d value along the first axis, as in :func:`measured_slope`.
        whole: names of the axes whose values are whole numbers.
    """
    first, *others = axes
    is_whole = first in whole
    ends = min(axes[first]), max(axes[first])
    rest = {name: sorted(axes[name]) for name in others}
    usual = {name: values[(len(values) - 1) // 2] for name, values in rest.items()}
    seen: list[Seen] = []

    def left() -> float:
        return budget - sum(one.share for one in seen)

    def next_at(point: Point, goal: tuple[float, float]) -> float | None:
        tried = [(one.point[first], one.tau_mean) for one in seen if one.point == {**one.point, **point}]
        return next_value(
            tried,
            ends=ends,
            band=goal,
            start=sum(ends) / 2 if start is None else start,
            slope=slope,
            is_whole=is_whole,
        )

    def slope_at(near: Seen) -> float:
        """Returns the slope of log τ̄ along the first axis.

        It is measured at the combination of the other axes that has most values of the first axis, or at `near`'s if
        tied.
        """
        ended = [near, *(one for one in seen if one.share == 1.0 and one.tau_mean > 0.0)]
        courses: dict[Any, list[tuple[float, float]]] = {}
        for one in ended:
            course = courses.setdefault(tuple(one.point[name] for name in rest), [])
            if (found := (one.point[first], one.tau_mean)) not in course:
                course.append(found)
        return measured_slope(max(courses.values(), key=len), band=band, prior=slope)

    combinations = [dict(zip(rest, values, strict=True)) for values in itertools.product(*rest.values())]

    def distance(one: Point, other: Point) -> int:
        """Returns the distance between two combinations, in numbers of values along the axes."""
        return sum(abs(values.index(one[name]) - values.index(other[name])) for name, values in rest.items())

    def untried_beside(point: Point) -> list[Point]:
        """Returns the combinations of the other axes that have not been tried, the nearest to `point` first."""
        tried = [{name: one.point[name] for name in rest} for one in seen]
        return sorted((one for one in combinations if one not in tried), key=lambda one: distance(one, point))

    while not (inside := [one for one in seen if one.is_in(band)]):
        if left() < 1.0:
            return
        if (value := next_at(usual, band)) is not None:
            seen += yield [{first: value, **usual}]
        elif not (known := [one for one in seen if one.tau_mean > 0.0]):
            return
        else:
            nearest = min(known, key=lambda one: _distance_to(band, one.tau_mean))
            if not (beside := untried_beside(nearest.point)):
                return
            seen += yield [{first: nearest.point[first], **beside[0]}]
    value = inside[0].point[first]
    # The nearest combinations come first, so that the farthest are left out if the budget is too small for all.
    # One whole trial's worth of the budget is kept for the decisions after this round.
    if round_ := [{first: value, **point} for point in untried_beside(inside[0].point)][: max(0, int(left() - 1.0))]:
        seen += yield round_
    while left() >= 1.0:
        inside = [one for one in seen if one.is_in(band)]
        inside.sort(key=lambda one: one.loss)
        best = inside[0]
        chosen = {name: best.point[name] for name in rest}
        if pairs := [
            (one, other)
            for one in inside
            if one.loss <= best.loss + _TIE * abs(best.loss)
            for other in untried_beside(one.point)
            if distance(one.point, other) == 1
        ]:
            near, point = pairs[0]
            at = near.point[first]
            expected = _extrapolated([one for one in seen if one.share == 1.0], near, point)
            value = next_value(
                [(at, expected)], ends=ends, band=band, start=at, slope=slope_at(near), is_whole=is_whole
            )
            seen += yield [{first: at if value is None else value, **point}]
        elif (value := next_at(chosen, _better_part(inside, best, band))) is not None:
            seen += yield [{first: value, **chosen}]
        else:
            return


def _distance_to(band: tuple[float, float], tau: float) -> float:
    """Returns the absolute difference between log τ and the middle of the band on the log scale."""
    return abs(math.log(tau) - math.log(band[0] * band[1]) / 2)


def _extrapolated(whole: Sequence[Seen], near: Seen, point: Point) -> float:
    """Returns the mean temperature to expect at a point that differs from `near` in one axis.

    It lies on the power law through `near` and the nearest of the whole trials that differ from it in that axis alone.
    If there is none, it is `near`'s own mean temperature.
    """
    (axis,) = [name for name, value in point.items() if near.point[name] != value]
    others = [
        one
        for one in whole
        if one is not near and one.tau_mean > 0.0 and {**one.point, axis: 0.0} == {**near.point, axis: 0.0}
    ]
    if not others or min(point[axis], *(one.point[axis] for one in (near, *others))) <= 0.0:
        return near.tau_mean
    at = math.log(near.point[axis])
    other = min(others, key=lambda one: abs(math.log(one.point[axis]) - at))
    exponent = math.log(other.tau_mean / near.tau_mean) / (math.log(other.point[axis]) - at)
    return near.tau_mean * math.exp(exponent * (math.log(point[axis]) - at))


def _better_part(inside: Sequence[Seen], best: Seen, band: tuple[float, float]) -> tuple[float, float]:
    """Returns the quarter of the band, on a log scale, at the end towards which the loss falls.

    While there is only one trial, it returns the whole band. A language model's loss follows its mean temperature
    beyond the band (docs/log.md), so the best value lies at an end of the band.
    """
    rest = [one.tau_mean for one in inside if one is not best]
    if not rest:
        return band
    quarter = (band[1] / band[0]) ** 0.25
    return (band[0], band[0] * quarter) if best.tau_mean < sum(rest) / len(rest) else (band[1] / quarter, band[1])


def next_value(
    seen: Sequence[tuple[float, float]],
    *,
    ends: tuple[float, float],
    band: tuple[float, float],
    start: float,
    slope: float = PRIOR_SLOPE,
    is_whole: bool = False,
) -> float | None:
    """Returns the value of an axis at which the mean temperature should be in the middle of the band.

    Args:
        seen: (value, mean temperature) of the trials so far; NaN for the temperature of a failed trial.
        ends: the smallest and the largest value that may be tried.
        band: bounds of the mean temperature.
        start: the value to try first.
        slope: prior of d log τ̄ / d value, as in :func:`measured_slope`.
        is_whole: whether the value must be a whole number.

    Returns:
        the value, or None if there is nothing left to try between the ends.
    """
    low, high = ends
    goal = math.log(band[0] * band[1]) / 2
    known = sorted((value, math.log(tau) - goal) for value, tau in seen if tau > 0.0)
    tried = [value for value, _ in seen]
    if not known:
        # All that is known is that those points failed, so move on towards the upper end.
        candidate = start
        for _ in tried:
            candidate = (candidate + high) / 2
    else:
        brackets = [(one, other) for one, other in itertools.pairwise(known) if (one[1] > 0.0) != (other[1] > 0.0)]
        if brackets:
            (left, before), (right, after) = min(brackets, key=lambda pair: abs(pair[0][1]) + abs(pair[1][1]))
            # Kept away from the ends of the bracket, because observations are noisy and the temperature is flat near
            # its bounds.
            share = min(max(before / (before - after), 0.1), 0.9)
            candidate = left + share * (right - left)
        else:
            nearest, distance = min(known, key=lambda one: abs(one[1]))
            candidate = nearest - distance / measured_slope(seen, band=band, prior=slope)
    candidate = _rounded(min(max(candidate, low), high), is_whole)
    nearby = 0.0 if is_whole else 1e-3
    return None if any(math.isclose(candidate, value, rel_tol=nearby) for value in tried) else candidate


def measured_slope(
    seen: Sequence[tuple[float, float]], *, band: tuple[float, float], prior: float = PRIOR_SLOPE
) -> float:
    """Returns d log τ̄ / d value by the two observations nearest to the band's middle, or the prior if fewer exist.

    The prior is taken to be off by a factor of at most 4. The observations decide the sign unless their difference is
    within the noise, since in a short run the temperature may rise with ρ.

    Args:
        seen: as in :func:`next_value`.
        band: bounds of the mean temperature.
        prior: the slope that is assumed before there are observations.
    """
    goal = math.log(band[0] * band[1]) / 2
    known = sorted(((value, math.log(tau) - goal) for value, tau in seen if tau > 0.0), key=lambda one: abs(one[1]))
    if len(known) < 2:
        return prior
    (first, one), (second, other) = known[:2]
    measured = (other - one) / (second - first)
    sign = math.copysign(1.0, measured if abs(other - one) > _NOISE else prior)
    return sign * min(max(sign * measured, abs(prior) / 4), abs(prior) * 4)


def _drawn(values: Sequence[float], rng: np.random.Generator, is_whole: bool) -> float:
    low, high = min(values), max(values)
    if low > 0 and high >= 10 * low:
        return _rounded(math.exp(rng.uniform(math.log(low), math.log(high))), is_whole)
    return _rounded(rng.uniform(low, high), is_whole)


def _rounded(value: float, is_whole: bool) -> float:
    return float(round(value)) if is_whole else float(f"{value:.{_NUM_DIGITS}g}")
