"""Controllers of ρ and of the weight of a KL divergence, each with a proportional and an integral term.

:class:`RhoController` keeps the mean temperature at a target while base model and TempNet learn together. The force on the
mean temperature is the derivative f'(τ) = H(p) − log K + ρ, averaged over instances with weights that say how strongly the
temperature of each one responds. With ρ₀ defined as the ρ at which this average is zero, the average is ρ − ρ₀. Scaling all
logits and τ by a factor c scales f by c (TempNet §4.1), so that in joint training only ρ = ρ₀ leaves the mean temperature
constant. ρ₀ moves as the base model learns, from near 0 to log K minus the model's final cross-entropy, and is followed:

    e = log(τ̄/τ*),  I ← I + κ·e/T,  ρ = ρ₀ + κ·e + I

where τ̄ is the mean temperature and τ* the target. The remaining force κ·e drives τ̄ towards the target, with damping. The
integral I corrects the remaining error, which arises because Adam divides every parameter's gradient by its size. T is
large, so that I cannot make the mean temperature oscillate, which an integral term alone would.

:class:`KLController` finds the weight λ for which a divergence settles at a target, as the adaptive penalty of PPO does:

    e = log((KL + ε)/(goal + ε)), held to [−1, 1]      I ← I + e/T      log λ = I + κ·e

PPO's own controller (Schulman et al. 2017, arXiv 1707.06347 §4; in log space Ziegler et al. 2019, arXiv 1909.08593 §2.2) has
the integral I alone. The divergence follows λ with a delay, because the network has to learn what λ asks for, so that an
integral alone overshoots; the proportional term κ·e damps that.

The goal rises from 0 to the target over the first steps, with their square. A network that may go far at once lowers every
temperature, since that is the first thing it can learn, and where all temperatures are low nothing varies and no reward
differs from another. One that is let out slowly spends each bit of divergence where it earns most. ε is a small share of the
target, so that the first goals, of nearly 0, are no harsh demands.
"""

from __future__ import annotations

import math
from typing import Any

_EPSILON = 0.02
# T of ρ's controller in steps, and the weight of the past in its average of ρ₀, of which a batch gives a noisy estimate.
_RESET_STEPS, _SMOOTHING = 100.0, 0.9
# Smallest and largest λ.
_BOUNDS = 1e-4, 1e4


class _Controller:
    """What both controllers share: their state, the values of the attributes in `_STATE`, is saved and restored."""

    _STATE: tuple[str, ...]

    def state(self) -> dict[str, Any]:
        """Return the state as plain values, in the form that :meth:`restore` takes."""
        return {name.lstrip("_"): getattr(self, name) for name in self._STATE}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from the state of another controller with the same settings."""
        for name in self._STATE:
            setattr(self, name, state[name.lstrip("_")])


def _check_range(values: dict[str, float], *, may_be_zero: bool = False) -> None:
    for name, value in values.items():
        if not (0.0 <= value < math.inf if may_be_zero else 0.0 < value < math.inf):
            wanted = "must not be negative but finite" if may_be_zero else "must be positive and finite"
            raise ValueError(f"{name} = {value:g} {wanted}")


class RhoController(_Controller):
    """Controller that computes the ρ of the next step from the mean temperatures and the excesses of previous steps.

    It begins with ρ in [0, `limit`), where it stays; the limit is log K. `target` is τ*, and `gain` κ, the change of ρ in
    nats for a temperature that is off by a factor of e. An argument outside its range raises ValueError, which names it.
    """

    _STATE = ("rho", "_neutral", "_integral")

    def __init__(self, rho: float, *, target: float, limit: float, gain: float = 5.0) -> None:
        if not 0.0 <= rho < limit:
            raise ValueError(f"rho = {rho:g} is outside [0, {limit:.4f})")
        _check_range({"target": target, "gain": gain})
        self.rho = rho
        self._target, self._limit, self._gain = target, limit, gain
        self._neutral: float | None = None
        self._integral = 0.0

    def update(self, tau_mean: float, excess: float) -> float:
        """Process a step's mean temperature τ̄ and excess ρ − ρ₀, the average of f'(τ); return the ρ of the next step.

        If the values are not finite (or the mean is not positive), nothing changes.
        """
        if not (math.isfinite(excess) and math.isfinite(tau_mean) and tau_mean > 0.0):
            return self.rho
        neutral = self.rho - excess
        if self._neutral is not None:
            neutral = _SMOOTHING * self._neutral + (1.0 - _SMOOTHING) * neutral
        self._neutral = neutral
        push = self._gain * math.log(tau_mean / self._target)
        integral = self._integral + push / _RESET_STEPS
        wanted = neutral + push + integral
        self.rho = min(max(wanted, 0.0), math.nextafter(self._limit, 0.0))
        if self.rho == wanted:  # At a bound the integral stays unchanged (anti-windup); it would only delay the return.
            self._integral = integral
        return self.rho


class KLController(_Controller):
    """Controller that computes the λ of the next step from the divergence of the last one.

    Args:
        weight: initial λ, in [1e-4, 1e4], where it stays.
        target: wanted divergence, in nats, of the same quantity that :meth:`update` is given.
        gain: κ, the exponent with which λ answers a divergence that is off.
        reset_steps: T, the number of steps in which an error of a factor e moves λ by a factor e.
        ramp_steps: number of steps in which the goal rises to the target, with their square; 0: it is the target at once.

    An argument outside its range raises ValueError, which names it.
    """

    _STATE = ("weight", "target", "_integral", "_num_steps")

    def __init__(
        self,
        weight: float,
        *,
        target: float,
        gain: float = 1.0,
        reset_steps: float = 30.0,
        ramp_steps: float = 0.0,
    ) -> None:
        _check_range({"target": target, "reset_steps": reset_steps})
        _check_range({"gain": gain, "ramp_steps": ramp_steps}, may_be_zero=True)
        if not _BOUNDS[0] <= weight <= _BOUNDS[1]:
            raise ValueError(f"weight = {weight:g} must lie in [{_BOUNDS[0]:g}, {_BOUNDS[1]:g}]")
        self.weight = weight
        self.target = target
        self._gain, self._reset_steps, self._ramp_steps = gain, reset_steps, ramp_steps
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
        low, high = map(math.log, _BOUNDS)
        self._num_steps += 1
        self._integral = min(max(self._integral + error / self._reset_steps, low), high)
        self.weight = math.exp(min(max(self._integral + self._gain * error, low), high))
        return self.weight


def divergence_of_success(share: float) -> float:
    """Return −log s, the divergence from a policy of the nearest one that always succeeds, in nats a text.

    That is π given the event of success (Csiszár 1975, the I-projection). It is what the leash must at least allow. A mean
    reward s of the policy that is not within (0, 1) raises ValueError: one that never succeeds has nothing to learn from,
    and one that always does has nothing to learn.
    """
    if not 0.0 < share < 1.0:
        raise ValueError(f"a share of successes of {share:g} must lie in (0, 1)")
    return -math.log(share)
