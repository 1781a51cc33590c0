"""Searches against what they search in: a falling mean temperature, trials that fail, and others to be better than."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.sweeps import search
from jobs.sweeps.objective import Objective
from jobs.sweeps.search import Point, Search, Seen, next_value
from jobs.sweeps.stopping import BandRule, Halving, TrialWatch
from jobs.training.watch import Validation

RHO, RATE = "temperature.rho", "optimizer.learning_rate_tempnet"
AXES = {RHO: [2.0, 4.5], RATE: [1e-3, 3e-3, 1e-2, 2e-2]}
BAND = (0.7, 1.0)
LOSS = Objective(score="cross_entropy_tau", title="cross-entropy at τ", is_better_higher=False)


def rounds(points: Search, answer: Callable[[Point], Seen]) -> list[list[Point]]:
    """All rounds of a search whose trials end as `answer` says."""
    found = [next(points)]
    while True:
        try:
            found.append(points.send([answer(point) for point in found[-1]]))
        except StopIteration:
            return found


def whole(point: Point, tau: float) -> Seen:
    return Seen(point=point, tau_mean=tau, is_whole=True)


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


@given(
    slope=st.floats(0.1, 1.3),
    right=st.floats(2.2, 4.3),
    bend=st.floats(-0.1, 0.1),
    noise=st.lists(st.floats(-0.08, 0.08), min_size=8, max_size=8),
)
def test_the_band_is_reached_within_four_trials(slope: float, right: float, bend: float, noise: list[float]) -> None:
    """log τ̄ falls by `slope` a nat, bent a little, from the middle of the band at `right`; trials end near there."""
    draws = iter(noise)

    def answer(point: Point) -> Seen:
        x = point[RHO] - right
        log_tau = math.log(0.7) / 2 - slope * x * (1 + bend * x) + next(draws)
        return whole(point, min(max(math.exp(log_tau), 0.01), 1.98))

    found = rounds(search.band({RHO: [2.0, 4.5]}, band=BAND, num_trials=8), answer)
    assert len(found) <= 4
    assert all(len(points) == 1 for points in found)
    assert len({points[0][RHO] for points in found}) == len(found)


def test_the_other_axes_are_tried_where_the_band_is() -> None:
    found = rounds(
        search.band(AXES, band=BAND, num_trials=8), lambda point: whole(point, math.exp(1.1 - 0.4 * point[RHO]))
    )
    reached = found[-2][0]
    assert all(point[RATE] == 3e-3 for points in found[:-1] for point in points)
    assert {point[RATE] for point in found[-1]} == {1e-3, 1e-2, 2e-2}
    assert {point[RHO] for point in found[-1]} == {reached[RHO]}
    few = rounds(
        search.band(AXES, band=BAND, num_trials=len(found)),
        lambda point: whole(point, math.exp(1.1 - 0.4 * point[RHO])),
    )
    assert sum(map(len, few)) == len(found)
    assert few[-1][0][RATE] in (1e-3, 1e-2)  # a neighbour of the usual one


def test_a_trial_that_was_cut_short_is_not_in_the_band() -> None:
    def answer(point: Point) -> Seen:
        return Seen(point=point, tau_mean=0.8, is_whole=False)

    assert len(rounds(search.band(AXES, band=BAND, num_trials=5), answer)) <= 5


def test_failed_trials_are_not_repeated_and_end_the_search_at_last() -> None:
    found = rounds(search.band(AXES, band=BAND, num_trials=5), lambda point: whole(point, math.nan))
    values = [point[RHO] for (point,) in found]
    assert len(values) == len(set(values)) == 5


def test_where_no_value_serves_the_search_ends() -> None:
    found = rounds(search.band(AXES, band=BAND, num_trials=8), lambda point: whole(point, 1.9))
    assert found[-1][0][RHO] == 4.5
    assert len(found) < 8


def test_what_is_known_before_comes_first() -> None:
    assert next(search.band(AXES, band=BAND, num_trials=4, start=2.2))[0][RHO] == 2.2
    assert next(search.band(AXES, band=BAND, num_trials=4))[0][RHO] == 3.25


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


@given(st.lists(st.tuples(st.integers(0, 9), st.floats(0.0, 10.0)), min_size=1, max_size=30))
def test_halving_lets_the_better_half_of_those_seen_go_on(arrivals: list[tuple[int, float]]) -> None:
    halving = Halving(8, is_better_higher=False)
    seen: dict[str, float] = {}
    for trial, score in arrivals:
        seen[str(trial)] = score
        better = sorted(seen.values()).index(score)
        assert halving.goes_on(str(trial), [1, 2], [9.0, score]) == (better < math.ceil(len(seen) / 2))


def test_halving_looks_only_at_the_rungs() -> None:
    halving = Halving(100, is_better_higher=True)
    assert halving.goes_on("a", [10, 20, 30, 40, 50, 60], [0.0, 0.1, 0.9, 0.9, 0.9, 0.9])
    assert halving.goes_on("b", [10, 20], [0.0, 0.0])  # before the first rung
    assert not halving.goes_on("b", [10, 20, 30], [0.0, 0.0, 0.5])
    assert halving.goes_on("b", [10, 20, 30, 40], [0.0, 0.0, 0.5, 0.1])  # between rungs
    assert halving.goes_on("b", [10, 20, 30, 40, 50], [0.0, 0.0, 0.5, 0.1, 0.95])


def test_a_trial_without_a_finite_score_diverges() -> None:
    watch = TrialWatch(trial="a", rule=RULE, objective=LOSS)
    validations = trajectory(0.85, 0.85)
    assert watch.reason_to_stop(validations) == ""
    validations[-1] = Validation(step=100, scores={"tau_mean": 0.85, "cross_entropy_tau": math.nan})
    assert "it diverges: cross-entropy at τ is nan at step 100" in watch.reason_to_stop(validations)
