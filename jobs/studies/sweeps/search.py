"""Which points a sweep tries: rounds of them, the next one chosen from what came of those before.

A search is a generator: it yields the points of a round and is sent what came of them. As it depends on nothing else, a
sweep that was interrupted makes the same search again, and finds in their directories the trials that it asks for.
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
"""Field → its values; a search that goes between them reads the first and the last in size as ends."""

# d log τ̄ / dρ per nat: what the papers' sweep found between ρ = 8 and 10.5 (TempNet Table 15: 1.65, 1.03, .95, .81, .69).
PRIOR_SLOPE = -0.35
# From one end of that sweep to the other, which is all that may be thought of an axis that is not ρ.
PRIOR_FALL = PRIOR_SLOPE * 2.5
# Of log τ̄ between two trials of one seed; what differs by less says nothing of the direction.
_NOISE = 0.02
# Of the loss, in proportion: which of two trials is the better one cannot be told below that.
_TIE = 1e-3
_NUM_DIGITS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What came of a point."""

    point: Point
    tau_mean: float
    """NaN if the trial failed."""
    loss: float
    """Of the validation; NaN if the trial failed."""
    share: float
    """Of its steps that it ran for, 1 if it was not cut short; of a trial that failed, 1 too."""

    def is_in(self, band: tuple[float, float]) -> bool:
        """Whether a whole trial ended there."""
        return self.share == 1.0 and band[0] <= self.tau_mean <= band[1]


Search: TypeAlias = Generator[list[Point], list[Seen], None]


def grid(axes: Axes) -> Search:
    """Every combination, in one round."""
    yield [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def corners(axes: Axes) -> list[Point]:
    """Every combination of the smallest and the largest values: where a point between is refused, one of these is too."""
    ends = [{min(values), max(values)} for values in axes.values()]
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*ends)]


def random(axes: Axes, *, num_trials: int, seed: int, whole: Collection[str] = ()) -> Search:
    """`num_trials` points between the ends of the axes, in one round: even, or in proportion where the larger end is 10 times
    the smaller or more. One that is drawn again is left out.

    Args:
        whole: the axes of whole numbers.
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
    """The value of the first axis that brings the mean temperature into the band, and the best of the other axes there.

    The first axis (ρ, say) is one in which the mean temperature is expected to fall. It is tried at `start` with the middle
    of all others; every observation then shifts the line log τ̄ = a + b·ρ, whose slope is the papers' until two
    observations give their own, and once the middle of the band lies between two of them it is interpolated. Where its ends
    do not reach the band, the other axes are tried from there. When a whole trial has ended in the band, combinations of the
    other axes race there in one round, the better ones to the end (`jobs.studies.sweeps.stopping`). What is left of the
    budget goes on from the best one: to a combination beside it that the race had no room for, as the loss may still fall
    there, at that value of the first axis which should bring it to the middle of the band; where there is none, to values
    of the first axis that should lead to that end of the band where the loss has been lower.

    Args:
        band: of the mean temperature.
        budget: in steps of whole trials; never exceeded.
        start: of the first axis; None: its middle.
        slope: what is known of it before, as :func:`measured_slope` takes it.
        whole: the axes of whole numbers.
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
        """Of log τ̄ in the first axis: that beside `near`, or where more of its values were tried."""
        ended = [near, *(one for one in seen if one.share == 1.0 and one.tau_mean > 0.0)]
        courses: dict[Any, list[tuple[float, float]]] = {}
        for one in ended:
            course = courses.setdefault(tuple(one.point[name] for name in rest), [])
            if (found := (one.point[first], one.tau_mean)) not in course:
                course.append(found)
        return measured_slope(max(courses.values(), key=len), band=band, prior=slope)

    combinations = [dict(zip(rest, values, strict=True)) for values in itertools.product(*rest.values())]

    def distance(one: Point, other: Point) -> int:
        """In values of the axes."""
        return sum(abs(values.index(one[name]) - values.index(other[name])) for name, values in rest.items())

    def untried_beside(point: Point) -> list[Point]:
        """Combinations of the other axes that were tried nowhere, the nearest first."""
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
    # From there outwards: what is left out for want of steps is what is farthest.
    # One whole trial is kept for what the race leaves open.
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
    """In proportion, from the middle."""
    return abs(math.log(tau) - math.log(band[0] * band[1]) / 2)


def _extrapolated(whole: Sequence[Seen], near: Seen, point: Point) -> float:
    """The mean temperature to expect at a point that differs from that of `near` in one axis: on the power law through `near`
    and the nearest of the whole trials that differ from it in that axis alone; `near`'s own where none does."""
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
    """The quarter of the band, in proportion, at the end towards which the loss falls; the whole band while one trial is all
    there is. A language model's loss follows its mean temperature beyond the band (docs/log.md): the best lies at an end."""
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
    """The value of an axis at which the mean temperature should be in the middle of the band.

    Args:
        seen: value and mean temperature of the trials so far, the latter NaN where one failed.
        ends: the smallest and the largest value that may be tried.
        start: what is tried first.
        slope: d log τ̄ / d value, as :func:`measured_slope` takes it.
        is_whole: whether the value must be a whole number.

    Returns:
        None if there is nothing left to try between the ends.
    """
    low, high = ends
    goal = math.log(band[0] * band[1]) / 2
    known = sorted((value, math.log(tau) - goal) for value, tau in seen if tau > 0.0)
    tried = [value for value, _ in seen]
    if not known:
        # Nothing is known but that those points failed: go on towards the end.
        candidate = start
        for _ in tried:
            candidate = (candidate + high) / 2
    else:
        brackets = [(one, other) for one, other in itertools.pairwise(known) if (one[1] > 0.0) != (other[1] > 0.0)]
        if brackets:
            (left, before), (right, after) = min(brackets, key=lambda pair: abs(pair[0][1]) + abs(pair[1][1]))
            # Kept off the ends of the bracket: an observation is noisy, and a bound is flat.
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
    """d log τ̄ / d value by the two observations nearest to the middle of the band; the prior where there is one or none.

    The prior may be off by a factor of 4, no more. The observations decide the sign unless they differ by no more than
    noise: in a short run the temperature may rise in ρ.

    Args:
        seen: as in :func:`next_value`.
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
