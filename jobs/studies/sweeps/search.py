"""Points of a sweep, and by what trials are compared.

A search is a generator: it yields the points of a round and is sent their results. It depends on nothing else, so a
sweep that was interrupted repeats the same search, and finds the finished trials in their directories.

The objective among trials in the band is a validation loss that is comparable between them, the lower the better. For
language models it is −log p of the next token; for dual encoders, −log p of the matching partner among all held-out ones
(`tempnet.contrastive.retrieval.cross_entropy`); both at the model's own temperatures. The training loss is not comparable,
because it depends on ρ.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

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
    points = [{name: _draw(values, rng, name in whole) for name, values in axes.items()} for _ in range(num_trials)]
    yield [point for number, point in enumerate(points) if point not in points[:number]]


def round_value(value: float, is_whole: bool) -> float:
    """Returns a value as it is tried: a whole number, or a number with four significant digits."""
    return float(round(value)) if is_whole else float(f"{value:.{_NUM_DIGITS}g}")


def _draw(values: Sequence[float], rng: np.random.Generator, is_whole: bool) -> float:
    low, high = min(values), max(values)
    if low > 0 and high >= 10 * low:
        return round_value(math.exp(rng.uniform(math.log(low), math.log(high))), is_whole)
    return round_value(rng.uniform(low, high), is_whole)
