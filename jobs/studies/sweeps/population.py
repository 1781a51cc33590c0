"""Population based training (arXiv 1711.09846): poor runs are given up for copies of good ones with other values.

All runs of a population train for a generation, which is an equal share of their steps. Then the worst fifth is given up,
and in the place of each of them a run of the best fifth, drawn at random, goes on with values that are multiplied by .8
or 1.2 (truncation selection and perturbation, §4.1.1 there). All others go on with the values that they have.

As a search, this depends on nothing but the results, so a sweep that was interrupted repeats the same generations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jobs.studies.sweeps.search import Axes, Point, PointResult, round_value

_SHARE = 0.2
_FACTORS = (0.8, 1.2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A run of a generation."""

    point: Point
    parent: int | None = None
    """Number of the run in the generation before, from whose last checkpoint this one starts; None in the first."""


def breed(
    results: Sequence[PointResult], *, axes: Axes, band: tuple[float, float], rng: np.random.Generator
) -> list[Member]:
    """Returns the next generation; empty if all runs have failed.

    A run whose mean temperature is in the band is better than all others; among these the lower loss decides. A run
    without a finite loss, which failed or diverged, is always given up.

    Args:
        results: the results of the generation before.
        axes: field → its values; those that are tried stay between the smallest and the largest.
        band: bounds of the mean temperature.
        rng: draws the parents and the factors.
    """
    ranks = {
        number: (band[0] <= result.tau_mean <= band[1], -result.loss)
        for number, result in enumerate(results)
        if math.isfinite(result.loss)
    }
    ranking = sorted(ranks, key=lambda number: ranks[number], reverse=True)
    num_moved = min(math.ceil(_SHARE * len(results)), len(results) // 2)
    kept = ranking[: len(results) - num_moved]
    members = []
    for number, result in enumerate(results):
        if number in kept:
            members.append(Member(point=result.point, parent=number))
        elif ranking:
            parent = ranking[rng.integers(min(num_moved, len(ranking)))]
            members.append(Member(point=_perturb(results[parent].point, axes, rng), parent=parent))
    return members


def _perturb(point: Point, axes: Axes, rng: np.random.Generator) -> Point:
    """Returns a point with every value multiplied by one of the factors, within the ends of its axis."""
    perturbed: Point = {}
    for name, value in point.items():
        low, high = min(axes[name]), max(axes[name])
        near = {round_value(min(max(value * factor, low), high), False) for factor in _FACTORS} - {value}
        perturbed[name] = float(rng.choice(sorted(near))) if near else value
    return perturbed


def last_steps(num_steps: int, *, num_generations: int, validation_every: int) -> list[int]:
    """Returns the step at which each generation ends: the first validation after its share of the steps."""
    ends = [
        math.ceil(number * num_steps / (num_generations * validation_every)) for number in range(1, num_generations)
    ]
    return [*(end * validation_every for end in ends), num_steps]
