"""Searches against what they search in: a falling mean temperature, trials that fail, and others to be better than."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.engine.watch import Validation
from jobs.studies.sweeps import search
from jobs.studies.sweeps.search import Point, Search, Seen, next_value
from jobs.studies.sweeps.stopping import BandRule, Halving, TrialWatch, rank

RHO, RATE = "temperature.rho", "optimizer.learning_rate_tempnet"
AXES = {RHO: [2.0, 4.5], RATE: [1e-3, 3e-3, 1e-2, 2e-2]}
BAND = (0.7, 1.0)


def rounds(points: Search, answer: Callable[[Point], Seen]) -> list[list[Point]]:
    """All rounds of a search whose trials end as `answer` says."""
    found = [next(points)]
    while True:
        try:
            found.append(points.send([answer(point) for point in found[-1]]))
        except StopIteration:
            return found


def whole(point: Point, tau: float, loss: float = 0.0) -> Seen:
    return Seen(point=point, tau_mean=tau, loss=loss, share=1.0)


def test_a_grid_is_one_round_of_every_combination() -> None:
    (points,) = rounds(search.grid(AXES), lambda point: whole(point, 1.0))
    assert [tuple(point.values()) for point in points] == list(itertools.product(*AXES.values()))


def test_a_random_search_draws_between_the_ends_and_is_repeatable() -> None:
    axes = {RHO: [2.0, 3.0], RATE: [1e-5, 1e-2]}
    points = next(search.random(axes, num_trials=400, seed=1))
    assert points == next(search.random(axes, num_trials=400, seed=1))
    assert points != next(search.random(axes, num_trials=400, seed=2))
    rho = np.array([point[RHO] for point in points])
    rate = np.log10([point[RATE] for point in points])
    assert 2.0 <= rho.min() < 2.1 < 2.9 < rho.max() <= 3.0
    # In proportion: half of the rates lie below the geometric mean of the ends.
    assert abs(np.median(rate) + 3.5) < 0.3


def test_a_random_search_of_whole_numbers_draws_whole_ones_each_once() -> None:
    points = next(search.random({"a": [2.0, 5.0], RHO: [3.0, 3.0]}, num_trials=100, seed=1, whole={"a"}))
    assert sorted(point["a"] for point in points) == [2.0, 3.0, 4.0, 5.0]
    wide = next(search.random({"a": [32.0, 4096.0]}, num_trials=20, seed=1, whole={"a"}))
    assert all(32 <= point["a"] <= 4096 and point["a"].is_integer() for point in wide)


def test_a_band_search_over_whole_numbers_stays_with_them() -> None:
    """The middle of the band lies at 200.3."""

    def answer(point: Point) -> Seen:
        return whole(point, math.sqrt(0.7) * math.exp(-0.02 * (point["a"] - 200.3)))

    found = [
        points[0]["a"]
        for points in rounds(search.band({"a": [32, 256]}, band=BAND, budget=6, slope=-0.005, whole={"a"}), answer)
    ]
    assert all(value.is_integer() for value in found)
    assert any(answer({"a": value}).is_in(BAND) for value in found)
    assert len(found) > 1


@given(
    slope=st.floats(0.1, 1.3),
    right=st.floats(2.2, 4.3),
    bend=st.floats(-0.1, 0.1),
    noise=st.lists(st.floats(-0.08, 0.08), min_size=8, max_size=8),
)
def test_the_band_is_reached_within_four_trials(slope: float, right: float, bend: float, noise: list[float]) -> None:
    """log τ̄ falls by `slope` a nat, bent a little, from the middle of the band at `right`; trials end near there."""
    draws = iter(noise)
    seen = {}

    def answer(point: Point) -> Seen:
        x = point[RHO] - right
        log_tau = math.log(0.7) / 2 - slope * x * (1 + bend * x) + next(draws)
        seen[point[RHO]] = tau = min(max(math.exp(log_tau), 0.01), 1.98)
        return whole(point, tau)

    found = rounds(search.band({RHO: [2.0, 4.5]}, band=BAND, budget=4), answer)
    taus = [seen[one[0][RHO]] for one in found]
    assert any(BAND[0] <= tau <= BAND[1] for tau in taus)
    assert len(found) <= 4
    assert all(len(points) == 1 for points in found)
    assert len(seen) == len(found)


def test_the_other_axes_are_tried_where_the_band_is_and_the_best_one_is_aimed_at() -> None:
    """The higher the rate, the lower τ and the lower the loss: the finer aim goes to the lower part of the band."""

    def answer(point: Point) -> Seen:
        tau = math.exp(1.1 - 0.4 * point[RHO] - 0.02 * math.log(point[RATE] / 3e-3))
        return whole(point, tau, loss=tau)

    found = rounds(search.band(AXES, band=BAND, budget=5), answer)
    ((first,), others, (last,)) = found
    assert first == {RHO: 3.25, RATE: 3e-3}
    # One of three is left out, the farthest, so that a whole trial is left.
    assert others == [{RHO: 3.25, RATE: 1e-3}, {RHO: 3.25, RATE: 1e-2}, {RHO: 3.25, RATE: 2e-2}]
    assert last[RATE] == 2e-2
    assert last[RHO] > 3.25
    assert BAND[0] < answer(last).tau_mean < math.sqrt(BAND[0] * BAND[1])


@pytest.mark.parametrize(
    ("loss", "beyond"),
    [
        (lambda rate: -rate, 2e-2),
        # Nothing lies below the smallest rate: a finer aim.
        (lambda rate: rate, None),
        # The best by less than can be told has no untried neighbour, the second best has.
        (lambda rate: {3e-3: 5.0, 1e-2: 5.0005}.get(rate, 6.0), 2e-2),
    ],
    ids=["falling", "rising", "a tie"],
)
def test_what_the_race_left_out_is_tried_where_the_loss_falls(
    loss: Callable[[float], float], beyond: float | None
) -> None:
    def answer(point: Point) -> Seen:
        tau = math.exp(1.1 - 0.4 * point[RHO] - 0.1 * math.log(point[RATE] / 3e-3))
        return whole(point, tau, loss=loss(point[RATE]))

    (_, others, (last,)) = rounds(search.band(AXES, band=BAND, budget=4), answer)
    # What is farthest from the usual is left out first.
    assert others == [{RHO: 3.25, RATE: 1e-3}, {RHO: 3.25, RATE: 1e-2}]
    assert last[RATE] == (beyond or 1e-3)
    assert last[RHO] != 3.25
    if beyond is not None:
        # Where the others are it would leave the band, as may be seen from how τ falls in the rate.
        assert answer({RHO: 3.25, RATE: beyond}).tau_mean < BAND[0]
        assert answer(last).tau_mean == pytest.approx(math.sqrt(BAND[0] * BAND[1]), rel=0.05)


def test_the_way_to_the_last_trial_is_that_which_was_measured() -> None:
    """τ rises in ρ, four times as steeply as the papers' falls, and falls in the rate: the last trial needs a higher ρ."""

    def answer(point: Point) -> Seen:
        tau = math.sqrt(0.7) * math.exp(1.0 * (point[RHO] - 2.7) - 0.1 * math.log(point[RATE] / 3e-3))
        return whole(point, tau, loss=-point[RATE])

    found = rounds(search.band(AXES, band=BAND, budget=6), answer)
    *_, others, (last,) = found
    assert len(others) == 2
    at = others[0][RHO]
    assert last[RATE] == 2e-2
    assert last[RHO] > at
    assert answer(last).tau_mean == pytest.approx(math.sqrt(0.7), rel=0.05)


def test_a_single_axis_is_searched_for_the_better_part_of_the_band() -> None:
    def answer(point: Point) -> Seen:
        tau = math.exp(1.1 - 0.4 * point[RHO])
        return whole(point, tau, loss=-tau)

    found = [points[0][RHO] for points in rounds(search.band({RHO: [2.0, 4.5]}, band=BAND, budget=4), answer)]
    assert len(found) <= 4
    # First the middle, then towards the end where the loss is lower.
    assert math.exp(1.1 - 0.4 * found[1]) == pytest.approx(math.sqrt(0.7), rel=0.01)
    assert 0.9 < math.exp(1.1 - 0.4 * found[-1]) < 1.0


@given(st.lists(st.tuples(st.floats(0.1, 2.0), st.floats(-1.0, 1.0), st.floats(0.5, 1.0)), min_size=12, max_size=12))
def test_the_budget_is_never_exceeded(ends: list[tuple[float, float, float]]) -> None:
    draws = iter(ends)
    spent = []

    def answer(point: Point) -> Seen:
        tau, loss, share = next(draws)
        spent.append(share)
        return Seen(point=point, tau_mean=tau, loss=loss, share=share)

    found = [
        tuple(point.values()) for points in rounds(search.band(AXES, band=BAND, budget=4), answer) for point in points
    ]
    assert sum(spent) <= 4.0
    assert len(set(found)) == len(found)


def test_a_trial_that_was_cut_short_is_not_in_the_band() -> None:
    def answer(point: Point) -> Seen:
        return Seen(point=point, tau_mean=0.8, loss=0.0, share=0.5)

    assert all(len(points) == 1 for points in rounds(search.band(AXES, band=BAND, budget=3), answer))


def test_failed_trials_are_not_repeated_and_end_the_search_at_last() -> None:
    found = rounds(search.band(AXES, band=BAND, budget=5), lambda point: whole(point, math.nan, math.nan))
    values = [point[RHO] for (point,) in found]
    assert len(values) == len(set(values)) == 5


def test_where_nothing_serves_the_search_ends() -> None:
    found = rounds(search.band(AXES, band=BAND, budget=20), lambda point: whole(point, 1.9))
    points = [tuple(point.values()) for (point,) in found]
    # ρ to its end, then every other rate once.
    assert points[-4][0] == 4.5
    assert [rate for _, rate in points[-3:]] == [1e-3, 1e-2, 2e-2]
    assert len(points) < 8


def test_where_the_first_axis_does_not_reach_the_band_another_does() -> None:
    """τ is a matter of the rate: the search goes on from the ρ that came nearest."""

    def answer(point: Point) -> Seen:
        return whole(point, 1.9 - 0.1 * point[RHO] - 40 * (point[RATE] - 3e-3))

    found = rounds(search.band({**AXES, RHO: [2.0, 3.0]}, band=BAND, budget=9), answer)
    reached = next(number for number, points in enumerate(found) if answer(points[0]).is_in(BAND))
    assert found[reached] == [{RHO: 3.0, RATE: 2e-2}]
    assert len(found[reached - 1]) == 1


@given(slope=st.floats(0.08, 1.0), right=st.floats(2.0, 4.5))
def test_an_axis_in_which_the_temperature_rises_is_turned_round(slope: float, right: float) -> None:
    """As CLIP's in a short run; the middle of the band lies at `right`."""

    def answer(point: Point) -> Seen:
        return whole(point, math.sqrt(0.7) * math.exp(slope * (point[RHO] - right)))

    found = rounds(search.band({RHO: [2.0, 4.5]}, band=BAND, budget=5), answer)
    assert any(answer(points[0]).is_in(BAND) for points in found)


def test_two_trials_that_are_equal_but_for_noise_say_nothing_of_the_direction() -> None:
    value = next_value([(3.0, 1.9), (3.2, 1.91)], ends=(2.0, 4.5), band=BAND, start=3.0)
    assert value == 4.5


def test_what_is_known_before_comes_first() -> None:
    assert next(search.band(AXES, band=BAND, budget=4, start=2.2))[0][RHO] == 2.2
    assert next(search.band(AXES, band=BAND, budget=4))[0][RHO] == 3.25


def test_a_bracket_is_never_left() -> None:
    value = next_value([(2.0, 1.9), (3.0, 1.2), (4.0, 0.2)], ends=(2.0, 4.5), band=BAND, start=3.0)
    assert value is not None
    assert 3.0 < value < 4.0


def trajectory(*taus: float, every: int = 50) -> list[Validation]:
    return [
        Validation(step=every * number, scores={"tau_mean": tau, "cross_entropy_tau": 5.0})
        for number, tau in enumerate(taus, start=1)
    ]


def first_stop(rule: BandRule, validations: list[Validation]) -> tuple[int, str]:
    for count in range(1, len(validations) + 1):
        if reason := rule.reason_to_stop(validations[:count]):
            return validations[count - 1].step, reason
    return 0, ""


RULE = BandRule(band=BAND, tau_min=0.001, tau_max=2.0, num_steps=600)


@pytest.mark.parametrize(
    ("taus", "step", "reason"),
    [
        ([1.0, 1.05, 1.0, 0.95, 0.9, 0.85, 0.85, 0.85, 0.85, 0.85, 0.85, 0.85], 0, ""),
        ([1.9, 1.99, 1.99, 1.99, 1.99, 1.99], 300, "at the bound of its range"),
        ([1.2, 1.3, 1.35, 1.4, 1.45, 1.5], 300, "settles outside the band"),
        ([0.9, 0.6, 0.5, 0.45, 0.4, 0.38], 300, "settles outside the band"),
        # Outside, but not farther than a temperature may still turn: the less is left, the less.
        ([0.9, 0.8, 0.7, 0.66, 0.64, 0.63, 0.64, 0.66, 0.68, 0.7, 0.71, 0.71], 0, ""),
        ([0.62] * 12, 500, "settles outside the band"),
        # Outside, but on its way in.
        ([1.5, 1.45, 1.38, 1.3, 1.22, 1.14, 1.06, 0.98], 0, ""),
        # Early on it may be anywhere, and later one look is not enough.
        ([1.3, 1.4, 1.2, 1.0, 0.9, 1.15, 0.9, 0.85, 1.05, 0.9], 0, ""),
    ],
)
def test_a_trial_is_cut_short_when_its_temperature_has_settled(taus: list[float], step: int, reason: str) -> None:
    stopped, why = first_stop(RULE, trajectory(*taus))
    assert stopped == step
    assert reason in why


def test_a_loss_without_a_temperature_is_left_alone() -> None:
    validations = [Validation(step=step, scores={"mean_recall": 0.5}) for step in range(100, 700, 100)]
    assert first_stop(RULE, validations) == (0, "")


@given(st.lists(st.tuples(st.integers(0, 9), st.booleans(), st.floats(0.0, 10.0)), min_size=1, max_size=30))
def test_halving_lets_the_better_half_of_those_seen_go_on(arrivals: list[tuple[int, bool, float]]) -> None:
    halving = Halving(4)
    seen: dict[str, tuple[bool, float]] = {}
    for trial, is_inside, score in arrivals:
        seen[str(trial)] = is_inside, score
        better = sorted(seen.values(), reverse=True).index((is_inside, score))
        assert halving.goes_on(str(trial), [1, 2], [(True, 0.0), (is_inside, score)]) == (
            better < math.ceil(len(seen) / 2)
        )


def test_halving_looks_only_at_the_rung() -> None:
    halving = Halving(100)
    good, bad = (True, 0.9), (True, 0.0)
    assert halving.goes_on("a", [20, 40, 60], [bad, bad, good])
    assert halving.goes_on("b", [20, 40], [bad, bad])
    assert not halving.goes_on("b", [20, 40, 60], [good, good, bad])
    assert halving.goes_on("b", [20, 40, 60, 80], [good, good, bad, bad])
    assert not halving.goes_on("c", [50], [(False, 2.0)])  # outside the band
    assert halving.goes_on("d", [50], [(True, 1.0)])


def test_the_band_ranks_before_the_loss() -> None:
    inside, outside = trajectory(0.8, 1.1)
    assert rank(inside, BAND) == (True, -5.0)
    assert rank(outside, BAND) == (False, -5.0)


def test_a_trial_without_a_finite_loss_diverges() -> None:
    watch = TrialWatch(trial="a", rule=RULE)
    validations = trajectory(0.85, 0.85)
    assert watch.reason_to_stop(validations) == ""
    validations[-1] = Validation(step=100, scores={"tau_mean": 0.85, "cross_entropy_tau": math.nan})
    assert "it diverges: cross-entropy at τ is nan at step 100" in watch.reason_to_stop(validations)
