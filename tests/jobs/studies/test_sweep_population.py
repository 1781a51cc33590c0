"""Tests population based training as a search: who is given up, whose place is taken, and which values are tried."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.studies.sweeps.population import breed, last_steps
from jobs.studies.sweeps.search import PointResult

AXES = {"temperature.rho": [1.0, 4.0, 2.0], "optimizer.learning_rate_base": [1e-4, 1e-2]}
BAND = (0.7, 1.0)

losses = st.one_of(st.floats(0.0, 9.0), st.just(math.nan), st.just(math.inf))
populations = st.lists(
    st.builds(
        lambda rho, rate, tau, loss: PointResult(
            point={"temperature.rho": rho, "optimizer.learning_rate_base": rate}, tau_mean=tau, loss=loss, share=0.5
        ),
        st.floats(1.0, 4.0).map(lambda value: float(f"{value:.4g}")),
        st.floats(1e-4, 1e-2).map(lambda value: float(f"{value:.4g}")),
        st.sampled_from([0.5, 0.8, math.nan]),
        losses,
    ),
    min_size=2,
    max_size=20,
)


def is_better(one: PointResult, other: PointResult) -> bool:
    in_band = [BAND[0] <= result.tau_mean <= BAND[1] for result in (one, other)]
    return in_band[0] if in_band[0] != in_band[1] else one.loss < other.loss


@given(populations, st.integers(0, 99))
def test_only_the_worst_give_way_to_the_best(results: list[PointResult], seed: int) -> None:
    members = breed(results, axes=AXES, band=BAND, rng=np.random.default_rng(seed))
    if not any(math.isfinite(result.loss) for result in results):
        assert members == []
        return
    assert len(members) == len(results)
    num_moved = min(math.ceil(len(results) / 5), len(results) // 2)
    finite = [result for result in results if math.isfinite(result.loss)]
    moved = [number for number, member in enumerate(members) if member.parent != number]
    failed = [number for number, result in enumerate(results) if not math.isfinite(result.loss)]
    assert set(failed) <= set(moved)
    assert len(moved) == max(num_moved, len(failed))
    for number, member in enumerate(members):
        assert member.parent is not None
        parent = results[member.parent]
        if number not in moved:
            assert member.point == parent.point
            continue
        # At most so many others are better than a parent, and none that stays is worse than one that is given up.
        assert sum(is_better(result, parent) for result in finite) < num_moved
        if number not in failed:
            assert not any(is_better(results[number], results[kept]) for kept in set(range(len(results))) - set(moved))
        for name, value in member.point.items():
            low, high = min(AXES[name]), max(AXES[name])
            tried = [float(f"{min(max(parent.point[name] * factor, low), high):.4g}") for factor in (0.8, 1.2)]
            assert value in tried
            assert value != parent.point[name]


def test_the_same_results_lead_to_the_same_generation() -> None:
    points = [{"temperature.rho": 1.0 + number} for number in range(4)]
    results = [PointResult(point=point, tau_mean=0.8, loss=point["temperature.rho"], share=0.5) for point in points]
    generations = [
        breed(results, axes={"temperature.rho": [1.0, 4.0]}, band=BAND, rng=np.random.default_rng(3)) for _ in range(2)
    ]
    assert generations[0] == generations[1]
    assert [member.parent for member in generations[0]] == [0, 1, 2, 0]
    assert generations[0][3].point == {"temperature.rho": 1.2}  # .8 lies outside the axis, and 1 is the parent's own


@pytest.mark.parametrize(
    ("num_steps", "num_generations", "every", "ends"),
    [(10, 2, 2, [6, 10]), (300, 4, 30, [90, 150, 240, 300]), (300, 4, 75, [75, 150, 225, 300]), (7, 3, 1, [3, 5, 7])],
)
def test_a_generation_ends_at_a_validation(num_steps: int, num_generations: int, every: int, ends: list[int]) -> None:
    assert last_steps(num_steps, num_generations=num_generations, validation_every=every) == ends


@given(st.integers(2, 9), st.integers(1, 50), st.data())
def test_every_generation_has_a_validation(num_generations: int, every: int, data: st.DataObject) -> None:
    num_steps = data.draw(st.integers(every * num_generations, 2000))
    ends = last_steps(num_steps, num_generations=num_generations, validation_every=every)
    assert len(ends) == num_generations
    assert ends == sorted(set(ends))
    assert all(end % every == 0 for end in ends[:-1])
    assert ends[-1] == num_steps
