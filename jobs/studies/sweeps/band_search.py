"""The searches of a sweep, which are generators: they yield the points of a round and are sent their results.

A search depends on nothing else, so a sweep that was interrupted repeats the same search, and finds the finished trials in
their directories. `jobs.studies.sweeps.tuning.BandSearch` is the band search as a `Searcher` of Ray Tune.

The objective among trials in the band is a validation loss that is comparable between them, the lower the better. For
language models it is −log p of the next token; for dual encoders, −log p of the matching partner among all held-out ones
(`tempnet.contrastive.retrieval.cross_entropy`); both at the model's own temperatures. The training loss is not comparable,
because it depends on ρ.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

Point: TypeAlias = dict[str, float]
"""A point of the search: field (`section.field`) → value."""
Axes: TypeAlias = Mapping[str, Sequence[float]]
"""Axes of a sweep: field → its values. Searches that also try values in between use the smallest and the largest as ends."""

LOSS = "cross_entropy_tau"
"""Name of the objective among the scores of a validation."""
TITLE = "cross-entropy at τ"
"""Name of the objective in tables and messages."""

_NUM_DIGITS = 4


def loss_of(scores: Mapping[str, float]) -> float:
    """Returns the objective of a validation, in nats; NaN if it has none."""
    return float(scores.get(LOSS, math.nan))


def describe_scores(scores: Mapping[str, float]) -> str:
    """Returns the mean temperature and the objective of a validation as text."""
    return f"mean τ {float(scores.get('tau_mean', math.nan)):.4f}, {TITLE} {loss_of(scores):.4f}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PointResult:
    """What the search is told about a point: how its trial ended."""

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


Search: TypeAlias = Generator[list[Point], list[PointResult], None]


def search_grid(axes: Axes) -> Search:
    """Yields every combination of the values, in one round."""
    yield [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def list_corners(axes: Axes) -> list[Point]:
    """Returns every combination of the axes' ends; if a point in between is invalid, one of these is too."""
    ends = [{min(values), max(values)} for values in axes.values()]
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*ends)]


def search_randomly(axes: Axes, *, num_trials: int, seed: int, whole: Collection[str] = ()) -> Search:
    """Yield `num_trials` random points between the ends of the axes, each once, in one round: log-uniformly if the larger end
    is at least 10 times the smaller, else uniformly. Values of the axes in `whole` are whole numbers.
    """
    rng = np.random.default_rng(seed)
    points = [{name: _draw(values, rng, name in whole) for name, values in axes.items()} for _ in range(num_trials)]
    yield [point for number, point in enumerate(points) if point not in points[:number]]


def round_value(value: float, is_whole: bool) -> float:
    """Returns a value as it is tried: a whole number, or a number with four significant digits."""
    return float(round(value)) if is_whole else float(f"{value:.{_NUM_DIGITS}g}")


def is_wide(values: Sequence[float]) -> bool:
    """Returns whether values are drawn and shown by their logarithms."""
    return min(values) > 0 and max(values) >= 10 * min(values)


def _draw(values: Sequence[float], rng: np.random.Generator, is_whole: bool) -> float:
    low, high = min(values), max(values)
    value = math.exp(rng.uniform(math.log(low), math.log(high))) if is_wide(values) else rng.uniform(low, high)
    return round_value(value, is_whole)


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
# Relative difference in loss below which two trials count as equally good. A search whose two best differed by .002 % chose
# a loss .9 % higher without it (measured at 289c795).
_TIE = 1e-3


@dataclass(slots=True, kw_only=True)
class _BandSearch:
    """A band search with its results so far; a combination is a value for every axis other than the first."""

    axes: Axes
    band: tuple[float, float]
    budget: float
    start: float | None = None
    slope: float = PRIOR_SLOPE
    whole: Collection[str] = ()
    first: str = ""
    others: dict[str, list[float]] = field(default_factory=dict)
    results: list[PointResult] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.first, *others = self.axes
        self.others = {name: sorted(self.axes[name]) for name in others}

    def run(self) -> Search:
        while not (inside := self._in_band()):
            point = self._choose_outside() if self._budget_left() >= 1.0 else None
            if point is None:
                return
            self.results += yield [point]
        # The nearest combinations come first, so that the farthest are left out if the budget is too small for all.
        # One whole trial's worth of the budget is kept for the decisions after this round.
        value = inside[0].point[self.first]
        num_points = max(0, int(self._budget_left() - 1.0))
        combinations = self._list_untried(inside[0].point)[:num_points]
        if combinations:
            self.results += yield [{self.first: value, **combination} for combination in combinations]
        while self._budget_left() >= 1.0 and (point := self._choose_inside()) is not None:
            self.results += yield [point]

    def _choose_outside(self) -> Point | None:
        """Returns the point to try next while no trial has ended in the band; None if nothing is left to try."""
        usual = {name: values[(len(values) - 1) // 2] for name, values in self.others.items()}
        if (value := self._follow_line(usual)) is not None:
            return {self.first: value, **usual}
        known = [result for result in self.results if result.tau_mean > 0.0]
        if not known:
            return None
        # Without this 24 points fewer of the searches from far away reach the band (measured at 289c795).
        nearest = min(known, key=lambda result: abs(log_distance(result.tau_mean, self.band)))
        combinations = self._list_untried(nearest.point)
        return {self.first: nearest.point[self.first], **combinations[0]} if combinations else None

    def _choose_inside(self) -> Point | None:
        """Returns the point to try next from the best trials in the band; None if nothing is left to try."""
        inside = sorted(self._in_band(), key=lambda result: result.loss)
        best = inside[0]
        for near in [result for result in inside if result.loss <= best.loss + _TIE * abs(best.loss)]:
            for combination in self._list_untried(near.point):
                if self._distance(near.point, combination) == 1:
                    start = near.point[self.first]
                    value = self._next_value([(start, self._extrapolate_tau(near, combination))])
                    return {self.first: start if value is None else value, **combination}
        chosen = {name: best.point[name] for name in self.others}
        value = self._follow_line(chosen)
        return None if value is None else {self.first: value, **chosen}

    def _in_band(self) -> list[PointResult]:
        return [result for result in self.results if result.is_in(self.band)]

    def _budget_left(self) -> float:
        return self.budget - sum(result.share for result in self.results)

    def _follow_line(self, combination: Point) -> float | None:
        """Returns the value of the first axis that should lead to the band, by the trials with this combination."""
        return self._next_value(
            [
                (result.point[self.first], result.tau_mean)
                for result in self.results
                if result.point == {**result.point, **combination}
            ]
        )

    def _next_value(self, observations: Sequence[tuple[float, float]]) -> float | None:
        ends = min(self.axes[self.first]), max(self.axes[self.first])
        start = sum(ends) / 2 if self.start is None else self.start
        is_whole = self.first in self.whole
        return next_value(observations, ends=ends, band=self.band, start=start, slope=self.slope, is_whole=is_whole)

    def _extrapolate_tau(self, near: PointResult, combination: Point) -> float:
        """Returns the mean temperature to expect at a combination that differs from a trial's in one axis.

        It lies on the power law through that trial and the nearest of the whole trials that differ from it in that axis
        alone. If there is none, it is that trial's own. Without the power law 17 points fewer of the searches on the
        recorded grid of language models come within .5 % of its best (measured at 289c795).
        """
        (axis,) = [name for name, value in combination.items() if near.point[name] != value]
        others = [
            result
            for result in self.results
            if result.share == 1.0
            and result.tau_mean > 0.0
            and result.point[axis] != near.point[axis]
            and {**result.point, axis: 0.0} == {**near.point, axis: 0.0}
        ]
        if not others or min(self.others[axis]) <= 0.0:
            return near.tau_mean
        log_value = math.log(near.point[axis])
        other = min(others, key=lambda result: abs(math.log(result.point[axis]) - log_value))
        exponent = math.log(other.tau_mean / near.tau_mean) / (math.log(other.point[axis]) - log_value)
        return near.tau_mean * math.exp(exponent * (math.log(combination[axis]) - log_value))

    def _distance(self, point: Point, other: Point) -> int:
        return sum(abs(values.index(point[name]) - values.index(other[name])) for name, values in self.others.items())

    def _list_untried(self, point: Point) -> list[Point]:
        """Returns the combinations that have not been tried, the nearest to `point` first."""
        tried = [{name: result.point[name] for name in self.others} for result in self.results]
        combinations = [
            dict(zip(self.others, values, strict=True)) for values in itertools.product(*self.others.values())
        ]
        untried = [combination for combination in combinations if combination not in tried]
        return sorted(untried, key=lambda combination: self._distance(combination, point))


def search_band(axes: Axes, *, band: tuple[float, float], budget: float, **options: Any) -> Search:
    """Searches the first axis for the value that brings the mean temperature into the band, then the other axes there.

    The search tries `start` on the first axis, with the middle values of all others, and then follows the line
    log τ̄ = a + b·value towards the middle of the band (:func:`next_value`). If the axis's ends do not reach the band, values
    of the other axes are tried from there. When a whole trial has ended in the band, combinations of the other axes compete
    there in one round, of which the better ones run to the end (`jobs.studies.sweeps.tuning`). The rest of the budget
    continues from the best trial: first with neighbouring combinations that the round had no room for, at the value of the
    first axis that should bring them to the middle of the band, then along the first axis.

    The budget, in whole trials, is never exceeded. Options are `start`, the first value to try on the first axis, its middle
    by default; `slope`, the prior of d log τ̄ / d value along it; `whole`, names of the axes whose values are whole numbers.
    """
    return _BandSearch(axes=axes, band=band, budget=budget, **options).run()


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

    Observations are (value, mean temperature) of the trials so far, NaN for the temperature of a failed trial; without any
    it is `start`. It is None if there is nothing left to try between the ends.
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
