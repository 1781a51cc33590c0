"""The rules that stop trials early.

A trial of a band search is stopped if its mean temperature has settled outside the band, if it diverges, or if others
with the same number of steps are better (asynchronous successive halving, arXiv 1810.05934). A trial of another sweep
is stopped if it diverges, or if the sweep's scheduler says so (`jobs.studies.sweeps.schedulers`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import ray
from ray.actor import ActorHandle

from jobs.engine.watch import Validation
from jobs.studies.sweeps.objective import TITLE, loss_of

Rank: TypeAlias = tuple[bool, float]
"""(whether the mean temperature is in the band, −loss); the higher the better."""

# Share of the steps before which no trial is stopped. Until then the mean temperature of joint training says little: it
# turns when the base model has learnt most of what it will learn (docs/log.md).
GRACE_SHARE = 0.5
# Temperatures within this share of the range from an end count as at the bound, as in `tempnet.statistics`.
_BOUND_SHARE = 0.01
# A mean temperature counts as settled only if it could not reach the band even at this multiple of its recent pace.
_PACE_FACTOR = 2.0
# In addition, log τ̄ may still move this far against its trend in half of the steps. Over 78 whole trials it moved by
# −.22 to .20 from half of the steps to the end (docs/log.md).
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

        The change still to expect is extrapolated from the pace of log τ̄ over the last third of the steps so far.
        Learning rates fall towards the end, so it will rather move less. As the temperature may still turn, it must be
        farther from the band than such turns go. Two successive validations have to agree.
        """
        if len(validations) < 3 or validations[-1].step < GRACE_SHARE * self.num_steps:
            return ""
        if "tau_mean" not in validations[-1].scores:
            return ""
        reason = self._judge_last(validations)
        return reason if reason and self._judge_last(validations[:-1]) else ""

    def _judge_last(self, validations: Sequence[Validation]) -> str:
        """Returns why the run cannot end in the band by its last validation; empty if it may."""
        now = validations[-1]
        tau = now.scores["tau_mean"]
        margin = _BOUND_SHARE * (self.tau_max - self.tau_min)
        if tau >= self.tau_max - margin or tau <= self.tau_min + margin:
            return f"the mean τ, {tau:.4g}, is at the bound of its range"
        low, high = self.band
        if low <= tau <= high:
            return ""
        before = next(validation for validation in validations if validation.step >= now.step * 2 / 3)
        if before is now:
            before = validations[-2]
        pace = math.log(tau / before.scores["tau_mean"]) / (now.step - before.step)
        outside, pace_back = (math.log(tau / high), -pace) if tau > high else (math.log(low / tau), pace)
        left = self.num_steps - now.step
        if outside > _PACE_FACTOR * max(pace_back, 0.0) * left + _SWING * left / (self.num_steps / 2):
            return f"the mean τ settles outside the band: {tau:.4g} at step {now.step}"
        return ""


class Halving:
    """Asynchronous successive halving: a trial goes on if it is in the better half of the trials that reached the rung.

    Args:
        num_steps: steps of a whole trial. The only rung is at half of them, since a higher learning rate that is best
            in the end may still be behind at a quarter (docs/log.md).
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


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialWatch:
    """Decides when to stop one trial; see `jobs.engine.watch.Watch`."""

    trial: str
    rule: BandRule | None = None
    """The rule that the mean temperature must be able to end in the band; None: it may end anywhere."""
    race: ActorHandle | None = None
    """Actor with a method `goes_on`, such as `Halving`, that the trials share; None: it does not compete with others."""

    def reason_to_stop(self, validations: Sequence[Validation]) -> str:
        """Returns why to stop the trial, or an empty string; checks divergence, then the band, then other trials."""
        last = validations[-1]
        loss = loss_of(last.scores)
        if not math.isfinite(loss):
            return f"it diverges: {TITLE} is {loss} at step {last.step}"
        if self.rule and (reason := self.rule.reason_to_stop(validations)):
            return reason
        if self.race is not None and not ray.get(self.race.goes_on.remote(self.trial, validations)):
            return f"other trials are better at step {last.step}: {TITLE} {loss:.4f}"
        return ""
