"""What a sweep gives to Ray Tune: the band search, what ends trials, and Tune's own schedulers."""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Mapping
from typing import Any

from ray import tune
from ray.tune import Stopper
from ray.tune.schedulers import ASHAScheduler, MedianStoppingRule, PopulationBasedTraining, TrialScheduler
from ray.tune.search import Searcher

from jobs.engine.worker import Validation
from jobs.studies.sweeps.band_search import PRIOR_SLOPE, search_band
from jobs.studies.sweeps.search import LOSS, TITLE, Axes, Point, PointResult, loss_of
from jobs.studies.sweeps.stopping import ETA, GRACE_SHARE, BandRule, Halving, rank_of


class BandSearch(Searcher):
    """Suggests the trials of a band search to Ray Tune; see :func:`search_band`.

    A trial must report `tau_mean`, `cross_entropy_tau` and `step`. Give `TuneConfig` `num_samples=-1`: the search ends
    itself. Its state is not saved, because the runs' own directories show what has been done.

    Args:
        axes: field → values; the first one is the axis that moves the mean temperature.
        band: bounds of the mean temperature.
        num_steps: steps of a whole trial.
        budget: number of steps in whole trials; never exceeded.
        start: first value to try on the first axis; None: its middle.
        slope: prior of d log τ̄ / d value along the first axis.
        whole: names of the axes whose values are whole numbers.
    """

    def __init__(
        self,
        axes: Axes,
        *,
        band: tuple[float, float],
        num_steps: int,
        budget: float = 4.0,
        start: float | None = None,
        slope: float | None = None,
        whole: Collection[str] = (),
    ) -> None:
        super().__init__(metric=LOSS, mode="min")
        slope = PRIOR_SLOPE if slope is None else slope
        self.band, self._num_steps = band, num_steps
        self._search = search_band(axes, band=band, budget=budget, start=start, slope=slope, whole=whole)
        self._is_over = False
        self._running: dict[str, int] = {}
        self.competes: dict[str, bool] = {}
        """Trial ID → whether others were chosen together with it, which it then competes with."""
        self.has_found = False
        """Whether a whole trial has ended in the band."""
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
        return dict(self._round[number])

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Record how a trial ended, and choose the next round after the last of this one."""
        number = self._running.pop(trial_id)
        scores: Mapping[str, Any] = {} if error or result is None else result
        share = min(1.0, scores.get("step", self._num_steps) / self._num_steps)
        tau = float(scores.get("tau_mean", math.nan))
        self._results[number] = PointResult(point=self._round[number], tau_mean=tau, loss=loss_of(scores), share=share)
        self.has_found |= self._results[number].is_in(self.band)
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

    def restore(self, checkpoint_path: str) -> None:
        """Does nothing: Tune's own state is never read back."""

    def __getstate__(self) -> dict[str, Any]:
        return {}


class RuleStopper(Stopper):
    """Ends trials of Ray Tune whose loss is not finite, and those that the rules of a band end.

    Args:
        rule: the band rule; None: only trials that diverge are ended.
        search: the band search that suggests the trials; None: they are of another search, and do not compete here.
    """

    def __init__(self, rule: BandRule | None, search: BandSearch | None = None) -> None:
        self._rule, self._search = rule, search
        self._race = Halving(rule.num_steps, rule.band) if rule and search else None
        self._validations: dict[str, list[Validation]] = {}
        self.reasons: dict[str, str] = {}
        """Trial ID → why it was ended."""

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        """Returns whether to end a trial after what it has reported."""
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
        if reason := self._rule.reason_to_stop(validations):
            return reason
        # A point that is alone in its round was chosen from the results of the others, so it does not compete.
        if self._race is None or self._search is None or not self._search.competes[trial_id]:
            return ""
        if self._search.has_found and not self._race.goes_on(trial_id, validations):
            return f"other trials are better at step {last.step}: {TITLE} {loss:.4f}"
        return ""


def make_scheduler(name: str, num_steps: int, points: Axes, num_generations: int) -> TrialScheduler | None:
    """Returns Ray Tune's scheduler of a name (`SweepSection.scheduler`); None for none.

    `asha` and `median` compare trials from half of their steps on, which is where the band search compares its own: a
    higher learning rate that is best in the end may still be behind at a quarter of the steps. With `pbt` all trials wait
    for each other after every part of their steps.

    Args:
        name: asha, median, pbt or none.
        num_steps: steps of a whole trial.
        points: field → its values, which are changed between the smallest and the largest by pbt.
        num_generations: parts of the steps after which pbt changes values.
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
