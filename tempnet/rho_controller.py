"""ρ as a controlled variable: it holds the mean temperature at a target while base and TempNet learn together.

What pushes the mean temperature is f'(τ) = H(p) − log K + ρ, averaged over instances by how much each of them gives way;
with ρ₀ the ρ at which that average is zero, it is ρ − ρ₀. Scaling all logits and τ by c scales f by c, so in joint training
no ρ but ρ₀ leaves the mean where it is (the gauge of the loss of TempNet §4.1), and ρ₀ moves as the base learns: from near
0 to log K less its final cross-entropy. So ρ follows it,

    e = log(τ̄/τ*),  I ← I + κ·e/T,  ρ = ρ₀ + κ·e + I         τ̄ the mean temperature, τ* the target

which leaves a push of κ·e towards the target, as a damper does. I takes up what that leaves over: Adam does not follow the
average slope alone, as it divides every parameter's gradient by its size (docs/log.md). T is long, so that I cannot swing the
mean temperature; an integral alone would.

Instances still differ by their H(p) from the mean, which is all that a temperature network has to learn.
"""

from __future__ import annotations

import math


class RhoController:
    """ρ for the next step, from the mean temperature and the excess of the steps before.

    Args:
        rho: where ρ starts, nats.
        target: τ*.
        limit: log K; ρ stays in [0, limit).
        gain: κ, nats for a temperature that is off by a factor of e.
        reset_steps: T.
        smoothing: weight of the past in the moving average of ρ₀, in [0, 1): one batch says little about it.

    Raises:
        ValueError: naming what is out of its range.
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
        """Take in a step and return the ρ of the next one; a step without finite values changes nothing.

        Args:
            tau_mean: τ̄.
            excess: ρ − ρ₀ at the ρ of the step: the average f'(τ).
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
        if self.rho == wanted:  # at a bound nothing more would come of it but a long way back
            self._integral = integral
        return self.rho

    def state(self) -> dict[str, float | None]:
        """What :meth:`restore` takes, as plain values."""
        return {"rho": self.rho, "neutral": self._neutral, "integral": self._integral}

    def restore(self, state: dict[str, float | None]) -> None:
        """Go on where another controller of the same settings stood."""
        rho, integral = state["rho"], state["integral"]
        assert rho is not None
        assert integral is not None
        self.rho, self._neutral, self._integral = rho, state["neutral"], integral
