"""When a trial of a band search ends early: its mean temperature has settled outside the band, it diverges, or others with
the same number of steps are better (asynchronous successive halving, arXiv 1810.05934)."""

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
"""The higher the better."""

# Of the steps. Before, the mean temperature of joint training says little: it turns when the base has learnt the most of what
# it will (docs/log.md).
_GRACE_SHARE = 0.5
# Temperatures within this share of the range from an end count as at the bound, as in `tempnet.statistics`.
_BOUND_SHARE = 0.01
# How much faster than of late a mean temperature may be expected to move, before it counts as settled.
_HOPE = 2.0
# And how far it may still go against that: in log τ̄ and half of the steps. Over 78 whole trials it moved by −.22 to .20 from
# half to the end (docs/log.md).
_SWING = 0.2
# Successive halving: the share of trials that go on is 1/η.
_ETA = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class BandRule:
    """Whether the mean temperature of a run can still end in the band."""

    band: tuple[float, float]
    tau_min: float
    tau_max: float
    num_steps: int

    def reason_to_stop(self, validations: Sequence[Validation]) -> str:
        """Why not; nothing while it can, or where the loss has no temperature.

        From the pace of log τ̄ over the last third of the steps so far, times what is left: rates fall towards the end, so it
        will rather move less. As it may still turn, it must be farther off than turns go. Two validations in a row have to
        agree.
        """
        if len(validations) < 3 or validations[-1].step < _GRACE_SHARE * self.num_steps:
            return ""
        if "tau_mean" not in validations[-1].scores:
            return ""
        last = self._verdict(validations)
        return last if last and self._verdict(validations[:-1]) else ""

    def _verdict(self, validations: Sequence[Validation]) -> str:
        now = validations[-1]
        tau = now.scores["tau_mean"]
        margin = _BOUND_SHARE * (self.tau_max - self.tau_min)
        if tau >= self.tau_max - margin or tau <= self.tau_min + margin:
            return f"the mean τ, {tau:.4g}, is at the bound of its range"
        low, high = self.band
        if low <= tau <= high:
            return ""
        then = next(one for one in validations if one.step >= now.step * 2 / 3)
        if then is now:
            then = validations[-2]
        pace = math.log(tau / then.scores["tau_mean"]) / (now.step - then.step)
        outside, pace_back = (math.log(tau / high), -pace) if tau > high else (math.log(low / tau), pace)
        left = self.num_steps - now.step
        if outside > _HOPE * max(pace_back, 0.0) * left + _SWING * left / (self.num_steps / 2):
            return f"the mean τ settles outside the band: {tau:.4g} at step {now.step}"
        return ""


class Halving:
    """Asynchronous successive halving: a trial goes on if it is among the better half of those seen at the rung.

    Args:
        num_steps: of a whole trial; the only rung is at half of it: a higher rate that is best at last may still be behind
            at a quarter (docs/log.md).
    """

    def __init__(self, num_steps: int) -> None:
        self._rung = num_steps // _ETA
        self._ranks: dict[str, Rank] = {}

    def goes_on(self, trial: str, steps: Sequence[int], ranks: Sequence[Rank]) -> bool:
        """Whether a trial with these validations so far, the last one new, is worth its next steps.

        What it had at the rung is taken in later too, so that a continued sweep only has to tell of the trials again.
        """
        reached = next((index for index, step in enumerate(steps) if step >= self._rung), None)
        if reached is None:
            return True
        here = self._ranks[trial] = ranks[reached]
        num_better = sum(rank > here for rank in self._ranks.values())
        return reached < len(steps) - 1 or num_better < math.ceil(len(self._ranks) / _ETA)


def rank(validation: Validation, band: tuple[float, float]) -> Rank:
    """In the band first, then the loss."""
    scores = validation.scores
    return band[0] <= scores.get("tau_mean", math.nan) <= band[1], -loss_of(scores)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialWatch:
    """Ends one trial; see `jobs.engine.watch.Watch`."""

    trial: str
    rule: BandRule
    halving: ActorHandle | None = None
    """A `Halving` that the trials share; None: only the band counts."""

    def reason_to_stop(self, validations: Sequence[Validation]) -> str:
        """Divergence first, then the band, then the others."""
        loss = loss_of(validations[-1].scores)
        if not math.isfinite(loss):
            return f"it diverges: {TITLE} is {loss} at step {validations[-1].step}"
        if reason := self.rule.reason_to_stop(validations):
            return reason
        if self.halving is not None:
            steps = [one.step for one in validations]
            ranks = [rank(one, self.rule.band) for one in validations]
            if not ray.get(self.halving.goes_on.remote(self.trial, steps, ranks)):
                return f"others are better at step {steps[-1]}: {TITLE} {loss:.4f}"
        return ""
