"""Find the weight λ of a KL divergence for which the divergence settles at a target, as the adaptive penalty of PPO does.

    e = log((KL + ε)/(goal + ε)), held to [−1, 1]      I ← I + e/T      log λ = I + κ·e

λ rises while texts are further from the base model than wanted, and falls while they are nearer. PPO's own controller
(Schulman et al. 2017, arXiv 1707.06347 §4; in log space Ziegler et al. 2019, arXiv 1909.08593 §2.2) has the integral I
alone. The divergence follows λ with a delay, because the network has to learn what λ asks for, so that an integral alone
overshoots; the proportional term κ·e damps that, as in `tempnet.rho_controller`.

The goal rises from 0 to the target over the first steps, with their square, since how much divergence is worth having is
known only up to a factor. A network that may go far at once lowers every temperature, since that is the first thing it can
learn, and where all temperatures are low nothing varies and no reward differs from another. One that is let out slowly spends
each bit of divergence where it earns most. ε is a small share of the target, so that the first goals, of nearly 0, are no
harsh demands.
"""

from __future__ import annotations

import math

_EPSILON = 0.02


class KLController:
    """Controller that computes the λ of the next step from the divergence of the last one.

    Args:
        weight: initial λ.
        target: wanted divergence, in nats, of the same quantity that :meth:`update` is given.
        gain: κ, the exponent with which λ answers a divergence that is off.
        reset_steps: T, the number of steps in which an error of a factor e moves λ by a factor e.
        ramp_steps: number of steps in which the goal rises to the target, with their square; 0: it is the target at once.
        bounds: smallest and largest λ.

    Raises:
        ValueError: if an argument is outside its range; the message names it.
    """

    def __init__(
        self,
        weight: float,
        *,
        target: float,
        gain: float = 1.0,
        reset_steps: float = 30.0,
        ramp_steps: float = 0.0,
        bounds: tuple[float, float] = (1e-4, 1e4),
    ) -> None:
        for name, value in (("target", target), ("reset_steps", reset_steps)):
            if not 0.0 < value < math.inf:
                raise ValueError(f"{name} = {value:g} must be positive and finite")
        for name, value in (("gain", gain), ("ramp_steps", ramp_steps)):
            if not 0.0 <= value < math.inf:
                raise ValueError(f"{name} = {value:g} must not be negative but finite")
        if not 0.0 < bounds[0] <= weight <= bounds[1] < math.inf:
            raise ValueError(f"weight = {weight:g} must lie in [{bounds[0]:g}, {bounds[1]:g}]")
        self.weight = weight
        self.target = target
        self._gain, self._reset_steps, self._ramp_steps = gain, reset_steps, ramp_steps
        self._bounds = math.log(bounds[0]), math.log(bounds[1])
        self._integral = math.log(weight)
        self._num_steps = 0

    @property
    def goal(self) -> float:
        """The divergence that is wanted of the next step, in nats."""
        if self._num_steps + 1 >= self._ramp_steps:
            return self.target
        return self.target * ((self._num_steps + 1) / self._ramp_steps) ** 2

    def update(self, kl: float) -> float:
        """Process the divergence of a step, in nats, and return the λ of the next; NaN and infinity change nothing."""
        if not math.isfinite(kl):
            return self.weight
        epsilon = _EPSILON * self.target
        error = min(max(math.log((max(kl, 0.0) + epsilon) / (self.goal + epsilon)), -1.0), 1.0)
        low, high = self._bounds
        self._num_steps += 1
        self._integral = min(max(self._integral + error / self._reset_steps, low), high)
        self.weight = math.exp(min(max(self._integral + self._gain * error, low), high))
        return self.weight

    def state(self) -> dict[str, float]:
        """Return the state as plain values, in the form that :meth:`restore` takes."""
        return {
            "weight": self.weight,
            "target": self.target,
            "integral": self._integral,
            "num_steps": float(self._num_steps),
        }

    def restore(self, state: dict[str, float]) -> None:
        """Continue from the state of another controller with the same settings."""
        self.weight, self.target, self._integral = state["weight"], state["target"], state["integral"]
        self._num_steps = int(state["num_steps"])


def divergence_of_success(share: float) -> float:
    """Return −log s, the divergence from a policy of the nearest one that always succeeds, in nats a text.

    The policy nearest to π among those that only give texts of an event is π given the event, whose divergence from π is
    −log of the event's probability (Csiszár 1975, the I-projection). It is what the leash must at least allow.

    Args:
        share: s, the mean reward of the policy.

    Raises:
        ValueError: if the share is not within (0, 1): a policy that never succeeds has nothing to learn from, and one that
            always does has nothing to learn.
    """
    if not 0.0 < share < 1.0:
        raise ValueError(f"a share of successes of {share:g} must lie in (0, 1)")
    return -math.log(share)
