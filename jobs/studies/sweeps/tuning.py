"""What a sweep gives to Ray Tune: the band search, the rules that end trials, and Tune's own schedulers.

In a band search a trial ends if its mean temperature has settled outside the band, or if others with the same number of
steps are better (asynchronous successive halving, arXiv 1810.05934).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from ray import tune
from ray.tune import Stopper
from ray.tune.schedulers import ASHAScheduler, MedianStoppingRule, PopulationBasedTraining, TrialScheduler
from ray.tune.search import Searcher

from jobs.engine.worker import Validation
from jobs.studies.sweeps.band_search import LOSS, TITLE, Axes, Point, PointResult, loss_of, search_band
from jobs.studies.sweeps.config import name_of

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
        """Return why the run cannot end in the band: its mean temperature is at a bound of its range, or farther away than
        log τ̄ may still move in the steps that are left. Empty: it may, or its loss has no temperature.
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
        """Return whether a trial with these validations, the last of which is new, should continue; its rank is recorded."""
        reached = [validation for validation in validations if validation.step >= self._rung]
        if not reached:
            return True
        rank = self._ranks[trial] = rank_of(reached[0], self._band)
        num_better = sum(other > rank for other in self._ranks.values())
        return len(reached) > 1 or num_better < math.ceil(len(self._ranks) / ETA)


def rank_of(validation: Validation, band: tuple[float, float]) -> Rank:
    scores = validation.scores
    return band[0] <= scores.get("tau_mean", math.nan) <= band[1], -loss_of(scores)


class BandSearch(Searcher):
    """Suggests the trials of a band search to Ray Tune; see :func:`search_band`.

    A trial must report `tau_mean`, `cross_entropy_tau` and `step`; `num_steps` are those of a whole trial. Give `TuneConfig`
    `num_samples=-1`: the search ends itself. Its state is not saved, as the runs' own directories show what has been done.
    """

    def __init__(
        self, axes: Axes, *, band: tuple[float, float], num_steps: int, budget: float = 4.0, **options: Any
    ) -> None:
        super().__init__(metric=LOSS, mode="min")
        self._num_steps = num_steps
        self._search = search_band(axes, band=band, budget=budget, **options)
        self._is_over = False
        self._running: dict[str, int] = {}
        self.competes: dict[str, bool] = {}
        """Trial ID → whether others were chosen together with it, which it then competes with."""
        self.points: dict[str, Point] = {}
        """Trial ID → its point."""
        self._begin(next(self._search))

    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:  # type: ignore[override]  # FINISHED is a string
        """Returns the next point; None if it is not known yet, or FINISHED if there are no more."""
        if self._is_over:
            return Searcher.FINISHED
        if self._num_asked == len(self._round):
            return None
        number = self._running[trial_id] = self._num_asked
        self._num_asked += 1
        self.competes[trial_id] = len(self._round) > 1
        self.points[trial_id] = self._round[number]
        return dict(self._round[number])

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Record how a trial ended, and choose the next round after the last of this one."""
        number = self._running.pop(trial_id)
        scores: Mapping[str, Any] = {} if error or result is None else result
        share = min(1.0, scores.get("step", self._num_steps) / self._num_steps)
        tau = float(scores.get("tau_mean", math.nan))
        self._results[number] = PointResult(point=self._round[number], tau_mean=tau, loss=loss_of(scores), share=share)
        if len(self._results) == len(self._round):
            try:
                self._begin(self._search.send([self._results[number] for number in range(len(self._round))]))
            except StopIteration:
                self._is_over = True

    def _begin(self, points: list[Point]) -> None:
        self._round, self._num_asked = points, 0
        self._results: dict[int, PointResult] = {}

    def save(self, checkpoint_path: str) -> None:
        """Does nothing: Tune's own state is never read back."""

    restore = save

    def __getstate__(self) -> dict[str, Any]:
        return {}


class RuleStopper(Stopper):
    """Ends trials of Ray Tune whose loss is not finite, and those that a rule ends; those of a band search compete.

    Runs whose names are in `finished` only report again, so that they are not ended.
    """

    def __init__(self, rule: BandRule | None, search: BandSearch | None = None, finished: Collection[str] = ()) -> None:
        self._rule, self._search, self._finished = rule, search, finished
        self._race = Halving(rule.num_steps, rule.band) if rule and search else None
        self._validations: dict[str, list[Validation]] = {}
        self.reasons: dict[str, str] = {}
        """Trial ID → why it was ended."""

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        if "tau_mean" not in result and LOSS not in result:
            return False
        validation = Validation(step=result["step"], scores=result)
        self._validations.setdefault(trial_id, []).append(validation)
        if reason := self._find_reason(trial_id, validation):
            self.reasons[trial_id] = reason
        return bool(reason)

    def stop_all(self) -> bool:
        """Returns False: the search itself ends."""
        return False

    def __deepcopy__(self, memo: Any) -> RuleStopper:
        return self  # Tune copies it, and its search must stay the one that suggests the trials

    def _find_reason(self, trial_id: str, last: Validation) -> str:
        loss, validations = loss_of(last.scores), self._validations[trial_id]
        if not math.isfinite(loss):
            return f"it diverges: {TITLE} is {loss} at step {last.step}"
        if self._rule is None:
            return ""
        if last.step >= self._rule.num_steps:
            if self._race is not None and rank_of(last, self._rule.band)[0]:
                self._race.goes_on(trial_id, validations)  # those that compete are compared with it
            return ""
        reason = self._rule.reason_to_stop(validations) or self._lost_race(trial_id, validations)
        # A run that is finished only reports again, but others compete with it as they did before.
        has_ended = self._search is not None and name_of(self._search.points[trial_id]) in self._finished
        return "" if has_ended else reason

    def _lost_race(self, trial_id: str, validations: Sequence[Validation]) -> str:
        # A point that is alone in its round was chosen from the results of the others, so it does not compete; a round has
        # several only after a whole trial has ended in the band.
        competes = self._search is not None and self._search.competes[trial_id]
        if self._race is None or not competes or self._race.goes_on(trial_id, validations):
            return ""
        last = validations[-1]
        return f"other trials are better at step {last.step}: {TITLE} {loss_of(last.scores):.4f}"


def make_scheduler(name: str, num_steps: int, points: Axes, num_generations: int) -> TrialScheduler | None:
    """Return Ray Tune's scheduler of a name (`SweepSection.scheduler`) for trials of `num_steps`; None for none.

    `asha` and `median` compare trials from half of their steps on, as the band search does. With `pbt` all trials wait for
    each other after every part of their steps, and values change between the smallest and the largest of their axis.
    """
    half = math.ceil(GRACE_SHARE * num_steps)
    common: dict[str, Any] = {"time_attr": "step", "metric": LOSS, "mode": "min"}
    if name == "asha":
        # With `num_steps` itself, ASHA would make the last step another rung.
        most = max(half, num_steps - 1)
        return ASHAScheduler(**common, grace_period=half, max_t=most, reduction_factor=ETA, stop_last_trials=False)
    if name == "median":
        # It would otherwise pause trials for those that wait.
        return MedianStoppingRule(**common, grace_period=half, min_samples_required=2, min_time_slice=sys.maxsize)
    if name == "pbt":
        ends = {field: (min(values), max(values)) for field, values in points.items()}

        def clip(point: dict[str, Any]) -> dict[str, Any]:
            return point | {field: min(max(point[field], low), high) for field, (low, high) in ends.items()}

        return PopulationBasedTraining(
            **common,
            perturbation_interval=num_steps // num_generations + 1,  # so that nothing changes after the last step
            hyperparam_mutations={field: tune.uniform(low, high) for field, (low, high) in ends.items()},
            quantile_fraction=0.2,
            resample_probability=0.0,
            custom_explore_fn=clip,
            synch=True,
        )
    return None
