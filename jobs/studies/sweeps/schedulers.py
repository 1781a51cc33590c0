"""Early stopping by a scheduler of Ray Tune (`--sweep.scheduler`).

A trial here is a whole training run, with worker processes, a directory and an MLflow run of its own. Where a scheduler
answers STOP, Tune would end the process that drives the trial, and with it the run: without an outcome, an export, or an
end in MLflow. Therefore the scheduler is not given to Tune's own loop. It is asked by the trials after every
validation, and a trial that should stop ends its run itself.

This serves every scheduler that decides by results alone and answers CONTINUE or STOP, such as `ASHAScheduler`, or
`MedianStoppingRule` with `min_time_slice=math.inf`. It cannot serve those that pause trials (`HyperBandScheduler`).

Nor can it serve `PopulationBasedTraining` and `PB2`, which give a trial another configuration while it runs. A run here
has one configuration from its first step to its last, by which it is found again. Population based training is
therefore a search of its own, in which every generation has runs of its own (`jobs.studies.sweeps.population`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ray.tune.experiment import Trial
from ray.tune.schedulers import ASHAScheduler, TrialScheduler

from jobs.engine.watch import Validation
from jobs.studies.sweeps.objective import LOSS
from jobs.studies.sweeps.stopping import ETA, GRACE_SHARE


def make_asha(num_steps: int) -> ASHAScheduler:
    """Returns ASHA with a single rung at half of the steps, where the trials with a loss above the median stop.

    The rung is where the band search has its own, because a higher learning rate that is best in the end may still be
    behind at a quarter of the steps.
    """
    grace_period = math.ceil(GRACE_SHARE * num_steps)
    return ASHAScheduler(
        time_attr="step",
        metric=LOSS,
        mode="min",
        grace_period=grace_period,
        max_t=max(grace_period, num_steps - 1),  # with num_steps itself, ASHA would make the last step another rung
        reduction_factor=ETA,
        stop_last_trials=False,
    )


class SchedulerRace:
    """Asks a scheduler of Ray Tune which trials go on. Its results have a `step` and the scores of a validation.

    Args:
        scheduler: a scheduler that uses nothing but the results, since there is no `TuneController` for it.
    """

    def __init__(self, scheduler: TrialScheduler) -> None:
        self._scheduler = scheduler
        self._trials: dict[str, Trial] = {}
        self._last_steps: dict[str, int] = {}
        self._stopped: set[str] = set()

    def goes_on(self, trial: str, validations: Sequence[Validation]) -> bool:
        """Returns whether a trial with these validations should continue; once it should not, that is final.

        Validations that the scheduler has not seen are reported to it, so a continued sweep only has to report its
        trials again.
        """
        if trial not in self._trials:
            self._trials[trial] = Trial("", trial_id=trial, stub=True)
            self._scheduler.on_trial_add(None, self._trials[trial])  # type: ignore[arg-type]
        answer = TrialScheduler.CONTINUE
        for validation in validations:
            if validation.step > self._last_steps.get(trial, 0):
                self._last_steps[trial] = validation.step
                result = {"step": validation.step, **validation.scores}
                answer = self._scheduler.on_trial_result(None, self._trials[trial], result)  # type: ignore[arg-type]
        if answer == TrialScheduler.STOP:  # as for the last validation; after those before it the trial has gone on
            self._stopped.add(trial)
        return trial not in self._stopped
