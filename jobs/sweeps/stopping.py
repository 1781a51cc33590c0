"""When a trial of a band search ends early: its mean temperature has settled outside the band, it diverges, or others with
the same number of steps are better (asynchronous successive halving, arXiv 1810.05934)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import ray
from ray.actor import ActorHandle

from jobs.sweeps.objective import Objective
from jobs.training.watch import Validation

# Of the steps. Before, the mean temperature of joint training says little: it turns when the base has learnt the most of what
# it will (docs/log.md).
_GRACE_SHARE = 0.5
# Temperatures within this share of the range from an end count as at the bound, as in `tempnet.statistics`.
_BOUND_SHARE = 0.01
# How much faster than of late a mean temperature may be expected to move, before it counts as settled.
_HOPE = 2.0
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
        will rather move less. Two validations in a row have to agree.
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
        reachable = tau * math.exp(_HOPE * pace * (self.num_steps - now.step))
        if (tau > high and reachable > high) or (tau < low and reachable < low):
            return f"the mean τ settles outside the band: {tau:.4g} at step {now.step}"
        return ""


class Halving:
    """Asynchronous successive halving: at every rung a trial goes on if it is among the better half of those seen there.

    Args:
        num_steps: of a whole trial; the rungs are at 1/4 and 1/2 of it.
        is_better_higher: of the score.
    """

    def __init__(self, num_steps: int, *, is_better_higher: bool) -> None:
        self._rungs = [num_steps // _ETA**2, num_steps // _ETA]
        self._sign = 1.0 if is_better_higher else -1.0
        self._scores: dict[int, dict[str, float]] = {rung: {} for rung in self._rungs}

    def goes_on(self, trial: str, steps: Sequence[int], scores: Sequence[float]) -> bool:
        """Whether a trial with these validations so far, the last one new, is worth its next steps.

        What it had at earlier rungs is taken in too, so that a continued sweep only has to tell of the trials again.
        """
        is_good = True
        for rung in self._rungs:
            reached = next((index for index, step in enumerate(steps) if step >= rung), None)
            if reached is None:
                continue
            here = self._scores[rung]
            here[trial] = self._sign * scores[reached]
            if reached == len(steps) - 1:
                num_better = sum(score > here[trial] for score in here.values())
                is_good = num_better < math.ceil(len(here) / _ETA)
        return is_good


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialWatch:
    """Ends one trial; see `jobs.training.watch.Watch`."""

    trial: str
    rule: BandRule
    objective: Objective
    halving: ActorHandle | None = None
    """A `Halving` that the trials share; None: only the band counts."""

    def reason_to_stop(self, validations: Sequence[Validation]) -> str:
        """Divergence first, then the band, then the others."""
        scores = [one.scores.get(self.objective.score, math.nan) for one in validations]
        if not math.isfinite(scores[-1]):
            return f"it diverges: {self.objective.title} is {scores[-1]} at step {validations[-1].step}"
        if reason := self.rule.reason_to_stop(validations):
            return reason
        if self.halving is not None:
            steps = [one.step for one in validations]
            if not ray.get(self.halving.goes_on.remote(self.trial, steps, scores)):
                return f"others have a better {self.objective.title} at step {steps[-1]}: {scores[-1]:.4f}"
        return ""
