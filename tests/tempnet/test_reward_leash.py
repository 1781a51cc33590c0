"""The controller of λ settles a divergence that follows λ late, and its state is all that it knows."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tempnet.reward_leash import KLController, divergence_of_success


def simulate(controller: KLController, *, steps: int, scale: float, power: float, delay: float) -> list[float]:
    """Return the divergences of a run in which log KL goes towards log(scale/λ^power) by a share 1/delay in every step."""
    log_kl, history = math.log(1e-4), []
    for _ in range(steps):
        log_kl += (math.log(scale) - power * math.log(controller.weight) - log_kl) / delay
        history.append(math.exp(log_kl))
        controller.update(history[-1])
    return history


@given(st.floats(0.1, 10.0), st.floats(0.5, 2.0), st.floats(3.0, 30.0), st.floats(0.2, 5.0), st.floats(0.01, 10.0))
def test_the_divergence_settles_at_its_target(
    scale: float, power: float, delay: float, target: float, weight: float
) -> None:
    controller = KLController(weight, target=target)
    history = simulate(controller, steps=1500, scale=scale, power=power, delay=delay)
    assert all(abs(math.log(kl / target)) < 0.02 for kl in history[-100:])
    assert controller.weight == pytest.approx((scale / target) ** (1 / power), rel=0.1)


def test_a_restored_controller_goes_on_exactly() -> None:
    whole, first, second = (KLController(0.3, target=2.0, ramp_steps=5.0) for _ in range(3))
    values = [0.1, 3.0, 2.5, math.nan, 1.0, 4.0]
    expected = [whole.update(value) for value in values]
    found = [first.update(value) for value in values[:3]]
    second.restore(first.state())
    assert found + [second.update(value) for value in values[3:]] == expected


def test_the_goal_rises_to_the_target_in_equal_steps_and_what_follows_it_leaves_the_weight_alone() -> None:
    controller = KLController(0.7, target=2.0, ramp_steps=8.0)
    goals = []
    for _ in range(12):
        goals.append(controller.goal)
        assert controller.update(controller.goal) == pytest.approx(0.7)
    assert goals == pytest.approx([0.25 * step for step in range(1, 9)] + [2.0] * 4)
    assert KLController(0.7, target=2.0).goal == 2.0


def test_the_weight_stays_within_its_bounds_and_comes_back_at_once() -> None:
    controller = KLController(1.0, target=1.0, bounds=(0.5, 2.0))
    for _ in range(200):
        controller.update(100.0)
    assert controller.weight == pytest.approx(2.0)
    assert controller.update(0.9) < 2.0
    assert all(controller.update(0.0) >= 0.5 for _ in range(200))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"target": 0.0}, "target = 0 must be positive"),
        ({"target": 1.0, "gain": -1.0}, "gain = -1 must not be negative"),
        ({"target": 1.0, "ramp_steps": -1.0}, "ramp_steps = -1 must not be negative"),
        ({"target": 1.0, "reset_steps": math.inf}, "reset_steps = inf must be positive and finite"),
        ({"target": 1.0, "bounds": (1.5, 2.0)}, r"weight = 1 must lie in \[1.5, 2\]"),
    ],
)
def test_wrong_settings_are_refused(arguments: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KLController(1.0, **arguments)  # type: ignore[arg-type]


def test_the_divergence_of_success_is_that_of_the_base_given_success() -> None:
    probabilities, is_success = [0.1, 0.2, 0.3, 0.4], [True, False, True, False]
    share = sum(p for p, success in zip(probabilities, is_success, strict=True) if success)
    given_success = [p / share if success else 0.0 for p, success in zip(probabilities, is_success, strict=True)]
    expected = sum(q * math.log(q / p) for q, p in zip(given_success, probabilities, strict=True) if q)
    assert divergence_of_success(share) == pytest.approx(expected)
    for wrong in (0.0, 1.0, math.nan):
        with pytest.raises(ValueError, match="must lie in"):
            divergence_of_success(wrong)
