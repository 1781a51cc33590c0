"""The part of Ray Tune that says which trial comes next: a `Searcher` that works through rounds of trials."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ray import cloudpickle
from ray.tune.search import Searcher

from jobs.engine.launch import claim_directory
from jobs.engine.recording import record_end
from jobs.scoring.mlflow_models.run import record_models
from jobs.studies.trials.trial import Outcomes, Rounds, Trial
from pipelines.storage import read_json

NO_OUTCOME = "the process that drives the trial ended"
"""Error of a trial that left neither an outcome nor an error of its own."""


class RoundSearcher(Searcher):
    """Hands trials to Tune one at a time, and none while the next round still waits for trials of the current one.

    Its state is neither saved nor restored: what has been done is read from the trials' own directories, where it is
    safe from the death of any process and is not unpickled, as it would be by `Tuner.restore`.
    """

    def __init__(self, rounds: Rounds) -> None:
        super().__init__()
        self._rounds = rounds
        self._requested: list[Trial] = []
        self._waiting: list[Trial] = []
        self._is_alone = False
        self._running: dict[str, Trial] = {}
        self._failed: dict[str, str] = {}
        self.finished: dict[str, dict[str, Any]] = {}
        # name → share of its steps that it ran for, for every trial that has ended in this session
        self.shares: dict[str, float] = {}
        self.is_over = False
        self.error: Exception | None = None
        """An error raised by the rounds; it is kept here because Tune would swallow it."""
        self._start_round(next(rounds))

    @property
    def first(self) -> Trial:
        """The first trial; all trials need the same resources."""
        return self._requested[0]

    def outcomes(self) -> Outcomes:
        """Returns the outcomes so far."""
        names = [trial.name for trial in self._requested]
        return Outcomes(
            finished={name: self.finished[name] for name in names if name in self.finished},
            failed={name: self._failed[name] for name in names if name in self._failed},
        )

    def share_finished_before(self) -> float:
        """Returns the length, in whole trials, of the trials that were finished before this session."""
        trials = [trial for trial in self._requested if trial.name in self.finished and trial.name not in self.shares]
        return sum(_share_of_steps(trial, self.finished[trial.name]) for trial in trials)

    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:  # type: ignore[override]  # FINISHED is a string
        """Returns the next trial; None if it is not known yet, or FINISHED if there are no more."""
        if self.is_over:
            return Searcher.FINISHED
        if not self._waiting:
            return None
        trial = self._waiting.pop(0)
        self._running[trial_id] = trial
        # Tune writes this to disk, and the URI may contain a password.
        pickled = cloudpickle.dumps(trial.with_tracking_uri(""))
        return {"name": trial.name, "trial": pickled, "is_alone": self._is_alone}

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Record how a trial ended, and start the next round; if it finished, its outcome is in its directory."""
        trial = self._running.pop(trial_id)
        if outcome := read_json(f"{trial.config.run.directory}/outcome.json"):
            self.finished[trial.name] = outcome
            self.shares[trial.name] = _share_of_steps(trial, outcome)
        else:
            self._failed[trial.name] = NO_OUTCOME
            self.shares[trial.name] = 1.0
        if not self._waiting and not self._running:
            try:
                self._next_round()
            except Exception as error:
                self.error, self.is_over = error, True

    def _start_round(self, trials: Sequence[Trial]) -> None:
        self._requested += trials
        for trial in trials:
            if (outcome := claim_directory(trial.config)) is not None:
                self.finished[trial.name] = outcome
                record_end(trial.config, outcome, record_models)
            else:
                self._waiting.append(trial)
        self._is_alone = len(self._waiting) == 1
        if not self._waiting:
            self._next_round()

    def _next_round(self) -> None:
        try:
            trials = self._rounds.send(self.outcomes())
        except StopIteration:
            self.is_over = True
        else:
            self._start_round(trials)

    def save(self, checkpoint_path: str) -> None:
        """Does nothing, because Tune's own state is never read back."""

    def restore(self, checkpoint_path: str) -> None:
        """Does nothing, because Tune's own state is never read back."""

    def __getstate__(self) -> dict[str, Any]:
        return {}


def _share_of_steps(trial: Trial, outcome: Mapping[str, Any]) -> float:
    """Returns the share of its steps that a trial ran for."""
    run = trial.config.run
    return float((outcome["num_steps"] - run.start_step) / run.num_steps)
