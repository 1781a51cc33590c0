"""Control ρ so that the mean temperature stays at a target while base model and TempNet learn together.

The force on the mean temperature is the derivative f'(τ) = H(p) − log K + ρ, averaged over instances with weights
that say how strongly the temperature of each one responds. With ρ₀ defined as the ρ at which this average is zero,
the average is ρ − ρ₀. Scaling all logits and τ by a factor c scales f by c (TempNet §4.1), so that in joint training
only ρ = ρ₀ leaves the mean temperature constant. ρ₀ moves as the base model learns, from near 0 to log K minus the
model's final cross-entropy. The controller therefore follows ρ₀ with a proportional and an integral term:

    e = log(τ̄/τ*),  I ← I + κ·e/T,  ρ = ρ₀ + κ·e + I

where τ̄ is the mean temperature and τ* the target. The remaining force κ·e drives the mean temperature towards the
target, with damping. The integral I corrects the remaining error, which arises because Adam does not follow the
average slope alone: it divides every parameter's gradient by its size (docs/results.md). T is large, so that I cannot
make the mean temperature oscillate, which an integral term alone would.

Instances still differ from the mean by their entropies H(p), and these differences are what a temperature network has
to learn.
"""

from __future__ import annotations

import math


class RhoController:
    """Controller that computes the ρ of the next step from the mean temperatures and the excesses of previous steps.

    Args:
        rho: initial ρ, in nats.
        target: target τ* of the mean temperature.
        limit: log K; ρ stays in [0, limit).
        gain: κ, the change of ρ in nats for a temperature that is off by a factor of e.
        reset_steps: time constant T of the integral term, in steps.
        smoothing: weight of the past in the moving average of ρ₀, in [0, 1); it is needed because one batch gives
            only a noisy estimate of ρ₀.

    Raises:
        ValueError: if an argument is outside its range; the message names it.
    """

    def __init__(
        self,
        rho: float,
        *,
        target: float,
        limit: float,
        gain: float = 5.0,
        reset_steps: float = 100.0,
        smoothing: float = 0.9,
    ) -> None:
        if not 0.0 <= rho < limit:
            raise ValueError(f"rho = {rho:g} is outside [0, {limit:.4f})")
        for name, value in (("target", target), ("gain", gain), ("reset_steps", reset_steps)):
            if not value > 0.0:
                raise ValueError(f"{name} = {value:g} must be positive")
        if not 0.0 <= smoothing < 1.0:
            raise ValueError(f"smoothing = {smoothing:g} must lie in [0, 1)")
        self.rho = rho
        self._target, self._limit, self._smoothing = target, limit, smoothing
        self._gain, self._reset_steps = gain, reset_steps
        self._neutral: float | None = None
        self._integral = 0.0

    def update(self, tau_mean: float, excess: float) -> float:
        """Process the values of a step and return the ρ of the next one.

        If the values are not finite (or the mean is not positive), nothing changes.

        Args:
            tau_mean: mean temperature τ̄ of the step.
            excess: ρ − ρ₀ at the ρ of the step, which is the average of f'(τ).
        """
        if not (math.isfinite(excess) and math.isfinite(tau_mean) and tau_mean > 0.0):
            return self.rho
        neutral = self.rho - excess
        if self._neutral is not None:
            neutral = self._smoothing * self._neutral + (1.0 - self._smoothing) * neutral
        self._neutral = neutral
        push = self._gain * math.log(tau_mean / self._target)
        integral = self._integral + push / self._reset_steps
        wanted = neutral + push + integral
        self.rho = min(max(wanted, 0.0), math.nextafter(self._limit, 0.0))
        if self.rho == wanted:  # At a bound the integral stays unchanged (anti-windup); it would only delay the return.
            self._integral = integral
        return self.rho

    def state(self) -> dict[str, float | None]:
        """Return the state of the controller as plain values, in the form that :meth:`restore` takes."""
        return {"rho": self.rho, "neutral": self._neutral, "integral": self._integral}

    def restore(self, state: dict[str, float | None]) -> None:
        """Continue from the state of another controller with the same settings."""
        rho, integral = state["rho"], state["integral"]
        assert rho is not None
        assert integral is not None
        self.rho, self._neutral, self._integral = rho, state["neutral"], integral
