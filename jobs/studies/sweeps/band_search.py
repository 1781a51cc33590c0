"""The band search: the value of the first axis that brings the mean temperature into the band, then the other axes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from jobs.studies.sweeps.search import Axes, Point, PointResult, Search
from jobs.studies.sweeps.temperature_line import PRIOR_SLOPE, log_distance, next_value

# Relative difference in loss below which two trials count as equally good. A search whose two best differed by .002 % chose
# a loss .9 % higher without it (measured at 289c795).
_TIE = 1e-3


def search_band(
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
    middle values of all other axes, and then follows the line log τ̄ = a + b·value towards the middle of the band. If
    the first axis's ends do not reach the band, values of the other axes are tried from there.

    When a whole trial has ended in the band, combinations of the other axes compete there in one round, of which the
    better ones run to the end (`jobs.studies.sweeps.stopping`). The rest of the budget continues from the best trial.
    Neighbouring combinations that the round had no room for come first, as the loss may still fall there; the first
    axis is set to the value that should bring them to the middle of the band. If there are none, the first axis is
    searched for the middle of the band.

    Args:
        axes: the axes; the first one is the axis that moves the mean temperature.
        band: bounds of the mean temperature.
        budget: number of steps in whole trials; never exceeded.
        start: first value to try on the first axis; None: its middle.
        slope: prior of d log τ̄ / d value along the first axis.
        whole: names of the axes whose values are whole numbers.
    """
    first, *others = axes
    ends = min(axes[first]), max(axes[first])
    return _BandSearch(
        first=first,
        ends=ends,
        others={name: sorted(axes[name]) for name in others},
        band=band,
        budget=budget,
        start=sum(ends) / 2 if start is None else start,
        slope=slope,
        is_whole=first in whole,
    ).run()


@dataclass(slots=True, kw_only=True)
class _BandSearch:
    """A band search with its results so far; a combination is a value for every axis other than the first."""

    first: str
    ends: tuple[float, float]
    others: dict[str, list[float]]
    band: tuple[float, float]
    budget: float
    start: float
    slope: float
    is_whole: bool
    results: list[PointResult] = field(default_factory=list)

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
        return next_value(
            observations, ends=self.ends, band=self.band, start=self.start, slope=self.slope, is_whole=self.is_whole
        )

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
        """Returns the distance between two combinations, in numbers of values along the axes."""
        return sum(abs(values.index(point[name]) - values.index(other[name])) for name, values in self.others.items())

    def _list_untried(self, point: Point) -> list[Point]:
        """Returns the combinations that have not been tried, the nearest to `point` first."""
        tried = [{name: result.point[name] for name in self.others} for result in self.results]
        combinations = [
            dict(zip(self.others, values, strict=True)) for values in itertools.product(*self.others.values())
        ]
        untried = [combination for combination in combinations if combination not in tried]
        return sorted(untried, key=lambda combination: self._distance(combination, point))
