"""Searches on known functions, with trials that fail."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.studies.sweeps.band_search import (
    Point,
    PointResult,
    Search,
    next_value,
    search_band,
    search_randomly,
)

RHO, RATE = "temperature.rho", "optimizer.learning_rate_tempnet"
AXES = {RHO: [2.0, 4.5], RATE: [1e-3, 3e-3, 1e-2, 2e-2]}
BAND = (0.7, 1.0)


def run_search(search: Search, answer: Callable[[Point], PointResult]) -> list[list[Point]]:
    """Returns all rounds of a search whose trials end as `answer` says."""
    rounds = [next(search)]
    while True:
        try:
            rounds.append(search.send([answer(point) for point in rounds[-1]]))
        except StopIteration:
            return rounds


def whole(point: Point, tau: float, loss: float = 0.0) -> PointResult:
    """Returns the result of a trial that ran for all its steps."""
    return PointResult(point=point, tau_mean=tau, loss=loss, share=1.0)


def test_a_random_search_draws_between_the_ends_and_is_repeatable() -> None:
    axes = {RHO: [2.0, 3.0], RATE: [1e-5, 1e-2]}
    points = next(search_randomly(axes, num_trials=400, seed=1))
    assert points == next(search_randomly(axes, num_trials=400, seed=1))
    assert points != next(search_randomly(axes, num_trials=400, seed=2))
    rho = np.array([point[RHO] for point in points])
    rate = np.log10([point[RATE] for point in points])
    assert 2.0 <= rho.min() < 2.1 < 2.9 < rho.max() <= 3.0
    # Half of the rates lie below the geometric mean of the ends, as they are drawn log-uniformly.
    assert abs(np.median(rate) + 3.5) < 0.3


def test_searches_over_whole_numbers_stay_with_them() -> None:
    """The middle of the band lies at 200.3, which is not a whole number."""
    points = next(search_randomly({"a": [2.0, 5.0], RHO: [3.0, 3.0]}, num_trials=100, seed=1, whole={"a"}))
    assert sorted(point["a"] for point in points) == [2.0, 3.0, 4.0, 5.0]  # each once

    def answer(point: Point) -> PointResult:
        return whole(point, math.sqrt(0.7) * math.exp(-0.02 * (point["a"] - 200.3)))

    search = search_band({"a": [32, 256]}, band=BAND, budget=6, slope=-0.005, whole={"a"})
    values = [points[0]["a"] for points in run_search(search, answer)]
    assert all(value.is_integer() for value in values)
    assert any(answer({"a": value}).is_in(BAND) for value in values)


@given(
    slope=st.floats(0.1, 1.3),
    right=st.floats(2.2, 4.3),
    bend=st.floats(-0.1, 0.1),
    noise=st.lists(st.floats(-0.08, 0.08), min_size=8, max_size=8),
)
def test_the_band_is_reached_within_four_trials(slope: float, right: float, bend: float, noise: list[float]) -> None:
    """log τ̄ falls by `slope` per nat of ρ where it passes the middle of the band, with a small bend and noise."""
    draws = iter(noise)
    taus: list[float] = []

    def answer(point: Point) -> PointResult:
        x = point[RHO] - right
        log_tau = math.log(0.7) / 2 - slope * x * (1 + bend * x) + next(draws)
        taus.append(min(max(math.exp(log_tau), 0.01), 1.98))
        return whole(point, taus[-1])

    rounds = run_search(search_band({RHO: [2.0, 4.5]}, band=BAND, budget=4), answer)
    assert any(BAND[0] <= tau <= BAND[1] for tau in taus)
    assert len({point[RHO] for (point,) in rounds}) == len(rounds) <= 4


def test_the_other_axes_are_tried_where_the_band_is_and_the_best_one_continues() -> None:
    """With a higher rate both τ and the loss are lower, so the last trial has the highest rate, nearer to the middle."""

    def answer(point: Point) -> PointResult:
        tau = math.exp(1.1 - 0.4 * point[RHO] - 0.06 * math.log(point[RATE] / 3e-3))
        return whole(point, tau, loss=tau)

    rounds = run_search(search_band(AXES, band=BAND, budget=5), answer)
    ((first,), others, (last,)) = rounds
    assert first == {RHO: 3.25, RATE: 3e-3}
    assert next(search_band(AXES, band=BAND, budget=5, start=2.2)) == [{RHO: 2.2, RATE: 3e-3}]
    # All three others fit into the round, and a whole trial is left.
    assert others == [{RHO: 3.25, RATE: 1e-3}, {RHO: 3.25, RATE: 1e-2}, {RHO: 3.25, RATE: 2e-2}]
    assert last[RATE] == 2e-2
    assert answer({RHO: 3.25, RATE: 2e-2}).tau_mean < 0.75
    assert answer(last).tau_mean == pytest.approx(math.sqrt(BAND[0] * BAND[1]), rel=0.05)


@pytest.mark.parametrize(
    ("loss", "beyond"),
    [
        (lambda rate: -rate, 2e-2),
        # There is no rate below the smallest, so another ρ is tried at that rate.
        (lambda rate: rate, None),
        # The two best are equally good but for noise, and only the second best has an untried neighbour.
        (lambda rate: {3e-3: 5.0, 1e-2: 5.0005}.get(rate, 6.0), 2e-2),
    ],
    ids=["falling", "rising", "a tie"],
)
def test_a_combination_that_the_round_left_out_is_tried_if_the_loss_falls_towards_it(
    loss: Callable[[float], float], beyond: float | None
) -> None:
    def answer(point: Point) -> PointResult:
        tau = math.exp(1.1 - 0.4 * point[RHO] - 0.1 * math.log(point[RATE] / 3e-3))
        return whole(point, tau, loss=loss(point[RATE]))

    (_, others, (last,)) = run_search(search_band(AXES, band=BAND, budget=4), answer)
    # The rate that is farthest from the middle one is left out first.
    assert others == [{RHO: 3.25, RATE: 1e-3}, {RHO: 3.25, RATE: 1e-2}]
    assert last[RATE] == (beyond or 1e-3)
    assert last[RHO] != 3.25
    if beyond is not None:
        # At the ρ of the others it would leave the band, as the fall of τ over the rates shows.
        assert answer({RHO: 3.25, RATE: beyond}).tau_mean < BAND[0]
        assert answer(last).tau_mean == pytest.approx(math.sqrt(BAND[0] * BAND[1]), rel=0.05)


@given(st.lists(st.tuples(st.floats(0.1, 2.0), st.floats(-1.0, 1.0), st.floats(0.5, 1.0)), min_size=12, max_size=12))
def test_the_budget_is_never_exceeded(ends: list[tuple[float, float, float]]) -> None:
    draws = iter(ends)
    spent = []

    def answer(point: Point) -> PointResult:
        tau, loss, share = next(draws)
        spent.append(share)
        return PointResult(point=point, tau_mean=tau, loss=loss, share=share)

    rounds = run_search(search_band(AXES, band=BAND, budget=4), answer)
    tried = [tuple(point.values()) for points in rounds for point in points]
    assert sum(spent) <= 4.0
    assert len(set(tried)) == len(tried)


def test_failed_trials_are_not_repeated_and_use_up_the_budget() -> None:
    rounds = run_search(search_band(AXES, band=BAND, budget=5), lambda point: whole(point, math.nan, math.nan))
    assert len({point[RHO] for (point,) in rounds}) == len(rounds) == 5


def test_a_search_that_cannot_reach_the_band_ends() -> None:
    rounds = run_search(search_band(AXES, band=BAND, budget=20), lambda point: whole(point, 1.9))
    points = [tuple(point.values()) for (point,) in rounds]
    # ρ is tried up to its end, and then every other rate once.
    assert points[-4][0] == 4.5
    assert [rate for _, rate in points[-3:]] == [1e-3, 1e-2, 2e-2]
    assert len(points) < 8


@given(slope=st.floats(0.08, 1.0), right=st.floats(2.0, 4.5))
def test_an_axis_in_which_the_temperature_rises_is_turned_round(slope: float, right: float) -> None:
    """The temperature rises along the axis, as CLIP's does in a short run; `right` leads to the middle of the band."""

    def answer(point: Point) -> PointResult:
        return whole(point, math.sqrt(0.7) * math.exp(slope * (point[RHO] - right)))

    rounds = run_search(search_band({RHO: [2.0, 4.5]}, band=BAND, budget=5), answer)
    assert any(answer(points[0]).is_in(BAND) for points in rounds)


def test_noise_decides_no_direction_and_a_bracket_is_never_left() -> None:
    assert next_value([(3.0, 1.9), (3.2, 1.91)], ends=(2.0, 4.5), band=BAND, start=3.0) == 4.5
    value = next_value([(2.0, 1.9), (3.0, 1.2), (4.0, 0.2)], ends=(2.0, 4.5), band=BAND, start=3.0)
    assert value is not None
    assert 3.0 < value < 4.0
