"""A steered ρ brings the mean temperature to its target without swinging, whatever the base does meanwhile."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tempnet.rho_controller import RhoController

LOG_K = math.log(2048)


def simulate(
    controller: RhoController,
    *,
    tau: float,
    pace: float,
    neutral: list[float],
    drift: float = 0.0,
    noise: list[float] | None = None,
) -> list[float]:
    """Simulate a run in which log τ̄ falls by `pace` per nat that ρ exceeds its neutral value, and by `drift`.

    The neutral value moves as the base learns.
    """
    history = []
    for step, value in enumerate(neutral):
        excess = controller.rho - value
        tau *= math.exp(-pace * (excess - drift))
        history.append(tau)
        controller.update(tau, excess + (noise[step % len(noise)] if noise else 0.0))
    return history


# ρ cannot go below 0, so what pulls is bounded: ranges in which that is enough to arrive in time.
PLANTS = {
    "start": st.floats(0.4, 1.7),
    "target": st.floats(0.5, 1.2),
    "pace": st.floats(5e-3, 0.05),
    "final": st.floats(1.5, 3.5),
    "drift": st.floats(-0.3, 0.3),
}


@given(**PLANTS)
def test_the_mean_goes_to_the_target_and_stays_while_the_base_learns(
    start: float, target: float, pace: float, final: float, drift: float
) -> None:
    # As the base learns, what its cross-entropy leaves of log K rises and settles.
    neutral = [final * (1 - math.exp(-step / 50)) for step in range(3000)]
    controller = RhoController(1.0, target=target, limit=LOG_K)
    history = simulate(controller, tau=start, pace=pace, neutral=neutral, drift=drift)
    assert all(value == pytest.approx(target, rel=0.02) for value in history[2000:])


@given(**PLANTS)
def test_it_is_damped(start: float, target: float, pace: float, final: float, drift: float) -> None:
    """It overshoots the target by hardly more than a third of the initial distance."""
    controller = RhoController(1.0, target=target, limit=LOG_K)
    history = simulate(controller, tau=start, pace=pace, neutral=[final] * 1000, drift=drift)
    distances = [math.log(value / target) for value in history]
    side = math.copysign(1.0, distances[0])
    assert min(side * distance for distance in distances) >= -(max(side * one for one in distances) / 3 + 0.25)


def test_noise_of_single_batches_hardly_moves_the_mean() -> None:
    controller = RhoController(2.0, target=0.85, limit=LOG_K)
    noise = [0.3 * math.sin(7.0 * number) for number in range(97)]
    history = simulate(controller, tau=0.85, pace=0.01, neutral=[2.5] * 2000, noise=noise)
    assert max(abs(math.log(value / 0.85)) for value in history[500:]) < 0.01


@given(excess=st.floats(-1e3, 1e3), tau=st.floats(1e-4, 10.0))
def test_rho_stays_feasible(excess: float, tau: float) -> None:
    controller = RhoController(1.0, target=0.85, limit=LOG_K)
    for _ in range(3):
        assert 0.0 <= controller.update(tau, excess) < LOG_K


@pytest.mark.parametrize("step", [(math.nan, 0.1), (0.85, math.inf), (0.0, 0.1)])
def test_a_step_without_meaning_changes_nothing(step: tuple[float, float]) -> None:
    controller = RhoController(1.0, target=0.85, limit=LOG_K)
    assert controller.update(*step) == 1.0


def test_a_restored_controller_goes_on_alike() -> None:
    steps = [(0.9 - 0.01 * number, 0.2 * math.sin(number)) for number in range(20)]
    whole, first = (RhoController(1.0, target=0.85, limit=LOG_K) for _ in range(2))
    expected = [whole.update(*step) for step in steps]
    got = [first.update(*step) for step in steps[:9]]
    second = RhoController(0.0, target=0.85, limit=LOG_K)
    second.restore(first.state())
    assert got + [second.update(*step) for step in steps[9:]] == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rho": 8.0}, r"rho = 8 is outside \[0, 7\.62"),
        ({"target": 0.0}, "target = 0 must be positive"),
        ({"gain": -1.0}, "gain = -1 must be positive"),
        ({"reset_steps": 0.0}, "reset_steps = 0 must be positive"),
        ({"smoothing": 1.0}, r"smoothing = 1 must lie in \[0, 1\)"),
    ],
)
def test_wrong_settings_are_refused(changes: dict[str, float], message: str) -> None:
    settings = {"rho": 1.0, "target": 0.85, "gain": 1.0, "smoothing": 0.9} | changes
    with pytest.raises(ValueError, match=message):
        RhoController(settings.pop("rho"), limit=LOG_K, **settings)
