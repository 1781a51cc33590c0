"""The rules of a band search that end trials early.

A trial ends if its mean temperature has settled outside the band, or if others with the same number of steps are better
(asynchronous successive halving, arXiv 1810.05934).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from jobs.engine.worker import Validation
from jobs.studies.sweeps.search import loss_of

Rank: TypeAlias = tuple[bool, float]
"""(whether the mean temperature is in the band, −loss); the higher the better."""

# Share of the steps before which no trial is stopped. Until then the mean temperature of joint training says little: it
# turns when the base model has learnt most of what it will learn.
GRACE_SHARE = 0.5
# Temperatures within this share of the range from an end count as at the bound, as in `tempnet.statistics`. Without that
# 44 points fewer of the searches for a band near a bound reach it (measured at 289c795).
_BOUND_SHARE = 0.01
# log τ̄ may still move this far in half of the steps: over 78 whole trials it moved by −.22 to .20. With 0,
# 5 points fewer of the searches from far away reach the band (measured at 289c795).
_SWING = 0.2
# Successive halving: a share of 1/η of the trials goes on.
ETA = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class BandRule:
    """Decides whether the mean temperature of a run can still end in the band."""

    band: tuple[float, float]
    tau_min: float
    tau_max: float
    num_steps: int

    def reason_to_stop(self, validations: Sequence[Validation]) -> str:
        """Returns why the run cannot end in the band, or an empty string if it may or if its loss has no temperature.

        It cannot if its mean temperature is at a bound of its range, or farther from the band than log τ̄ may still move
        in the steps that are left.
        """
        now = validations[-1]
        tau = now.scores.get("tau_mean", math.nan)
        if now.step < GRACE_SHARE * self.num_steps or math.isnan(tau):
            return ""
        margin = _BOUND_SHARE * (self.tau_max - self.tau_min)
        if not self.tau_min + margin < tau < self.tau_max - margin:
            return f"the mean τ, {tau:.4g}, is at the bound of its range"
        low, high = self.band
        if max(math.log(tau / high), math.log(low / tau)) > _SWING * 2 * (1 - now.step / self.num_steps):
            return f"the mean τ settles outside the band: {tau:.4g} at step {now.step}"
        return ""


class Halving:
    """Asynchronous successive halving: a trial goes on if it is in the better half of the trials that reached the rung.

    Args:
        num_steps: steps of a whole trial. The only rung is at half of them, since a higher learning rate that is best
            in the end may still be behind at a quarter (measured: 2e-2 on the papers' grid of ρ and learning rate).
        band: bounds of the mean temperature; trials in the band are better than all others.
    """

    def __init__(self, num_steps: int, band: tuple[float, float]) -> None:
        self._rung = num_steps // ETA
        self._band = band
        self._ranks: dict[str, Rank] = {}

    def goes_on(self, trial: str, validations: Sequence[Validation]) -> bool:
        """Returns whether a trial with these validations, the last of which is new, should continue.

        Its rank at the rung is recorded even if it is reported later, so a continued sweep only has to report its
        trials again.
        """
        reached = [validation for validation in validations if validation.step >= self._rung]
        if not reached:
            return True
        rank = self._ranks[trial] = rank_of(reached[0], self._band)
        num_better = sum(other > rank for other in self._ranks.values())
        return len(reached) > 1 or num_better < math.ceil(len(self._ranks) / ETA)


def rank_of(validation: Validation, band: tuple[float, float]) -> Rank:
    """Returns the rank of a validation: being in the band counts first, then the loss."""
    scores = validation.scores
    return band[0] <= scores.get("tau_mean", math.nan) <= band[1], -loss_of(scores)
