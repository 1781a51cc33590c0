"""The controllers of ρ and of the weight λ of a divergence settle what they steer, whose response is simulated."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tempnet.controllers import KLController, RhoController, divergence_of_success

LOG_K = math.log(2048)


def rho_controller(rho: float = 1.0, **changes: Any) -> RhoController:
    return RhoController(rho, **{"target": 0.85, "limit": LOG_K, **changes})


def temperatures(
    controller: RhoController, *, tau: float, pace: float, neutral: list[float], drift: float
) -> list[float]:
    """Simulate a run in which log τ̄ falls by `pace` per nat that ρ exceeds its neutral value, and by `drift`.

    The neutral value moves as the base learns.
    """
    history = []
    for value in neutral:
        excess = controller.rho - value
        tau *= math.exp(-pace * (excess - drift))
        history.append(tau)
        controller.update(tau, excess)
    return history


# ρ cannot go below 0, so what pulls is bounded: ranges in which that is enough to arrive in time.
@given(
    start=st.floats(0.4, 1.7),
    target=st.floats(0.5, 1.2),
    pace=st.floats(5e-3, 0.05),
    final=st.floats(1.5, 3.5),
    drift=st.floats(-0.3, 0.3),
)
def test_the_mean_goes_to_the_target_stays_while_the_base_learns_and_is_damped(
    start: float, target: float, pace: float, final: float, drift: float
) -> None:
    # As the base learns, what its cross-entropy leaves of log K rises and settles.
    neutral = [final * (1 - math.exp(-step / 50)) for step in range(2500)]
    history = temperatures(rho_controller(target=target), tau=start, pace=pace, neutral=neutral, drift=drift)
    assert all(value == pytest.approx(target, rel=0.02) for value in history[2000:])
    # Without learning it overshoots the target by hardly more than a third of the initial distance.
    history = temperatures(rho_controller(target=target), tau=start, pace=pace, neutral=[final] * 1000, drift=drift)
    distances = [math.log(value / target) for value in history]
    side = math.copysign(1.0, distances[0])
    assert min(side * distance for distance in distances) >= -(max(side * one for one in distances) / 3 + 0.25)


@given(excess=st.floats(-1e3, 1e3), tau=st.floats(1e-4, 10.0))
def test_rho_stays_feasible_and_a_step_without_meaning_changes_nothing(excess: float, tau: float) -> None:
    controller = rho_controller()
    for _ in range(3):
        assert 0.0 <= controller.update(tau, excess) < LOG_K
    before = controller.rho
    for step in ((math.nan, 0.1), (0.85, math.inf), (0.0, 0.1)):
        assert controller.update(*step) == before


@given(st.floats(0.1, 10.0), st.floats(0.5, 2.0), st.floats(3.0, 30.0), st.floats(0.2, 5.0), st.floats(0.01, 10.0))
def test_the_divergence_settles_at_its_target(
    scale: float, power: float, delay: float, target: float, weight: float
) -> None:
    """In every step log KL goes towards log(scale/λ^power) by a share 1/delay."""
    controller = KLController(weight, target=target)
    log_kl, history = math.log(1e-4), []
    for _ in range(1500):
        log_kl += (math.log(scale) - power * math.log(controller.weight) - log_kl) / delay
        history.append(math.exp(log_kl))
        controller.update(history[-1])
    assert all(abs(math.log(kl / target)) < 0.02 for kl in history[-100:])
    assert controller.weight == pytest.approx((scale / target) ** (1 / power), rel=0.1)


def test_the_goal_rises_to_the_target_and_what_follows_it_leaves_the_weight_alone() -> None:
    controller = KLController(0.7, target=2.0, ramp_steps=8.0)
    goals = []
    for _ in range(12):
        goals.append(controller.goal)
        assert controller.update(controller.goal) == pytest.approx(0.7)
    assert goals == pytest.approx([2.0 * (step / 8) ** 2 for step in range(1, 9)] + [2.0] * 4)


def test_the_weight_stays_within_its_bounds_and_comes_back_at_once() -> None:
    controller = KLController(1.0, target=1.0)
    for _ in range(1000):
        controller.update(100.0)
    assert controller.weight == pytest.approx(1e4)
    assert controller.update(0.9) < 1e4
    assert all(controller.update(0.0) >= 1e-4 for _ in range(1000))


def test_the_divergence_of_success_is_that_of_the_base_given_success() -> None:
    given_success = {0.1: 0.1 / 0.4, 0.3: 0.3 / 0.4}  # of the probabilities .1, .2, .3 and .4, two are successes
    expected = sum(q * math.log(q / p) for p, q in given_success.items())
    assert divergence_of_success(0.4) == pytest.approx(expected)
    for wrong in (0.0, 1.0, math.nan):
        with pytest.raises(ValueError, match="must lie in"):
            divergence_of_success(wrong)


@pytest.mark.parametrize(
    ("make", "changes", "message"),
    [
        (rho_controller, {"rho": 8.0}, r"rho = 8 is outside \[0, 7\.62"),
        (rho_controller, {"target": 0.0}, "target = 0 must be positive"),
        (rho_controller, {"gain": -1.0}, "gain = -1 must be positive"),
        (KLController, {"target": 0.0}, "target = 0 must be positive"),
        (KLController, {"gain": -1.0}, "gain = -1 must not be negative"),
        (KLController, {"ramp_steps": -1.0}, "ramp_steps = -1 must not be negative"),
        (KLController, {"reset_steps": math.inf}, "reset_steps = inf must be positive and finite"),
        (KLController, {"weight": 2e4}, r"weight = 20000 must lie in \[0.0001, 10000\]"),
    ],
)
def test_wrong_settings_are_refused(make: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**{"weight": 1.0, "target": 1.0, **changes} if make is KLController else changes)
