"""The lines on the terminal that say which trials have ended and how long the others will take."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from ray import tune
from ray.tune.experiment import Trial as TuneTrial

from jobs.engine.console import clock
from jobs.studies.trials.searcher import RoundSearcher


class ProgressLines(tune.Callback):
    """Prints a line for every trial that ends.

    Args:
        searcher: knows the outcomes.
        length: maximum length of all rounds together, in whole trials.
        describe: describes an outcome in a few words.
    """

    def __init__(self, searcher: RoundSearcher, length: float, describe: Callable[[Mapping[str, Any]], str]) -> None:
        self._searcher, self._length, self._describe = searcher, length, describe
        self._started = time.monotonic()

    def on_trial_complete(self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, **info: Any) -> None:
        """Print how a trial ended that did not raise an error."""
        name = trial.config["name"]
        outcome = self._searcher.finished.get(name)
        self._print_line(name, self._describe(outcome) if outcome else "ended without an outcome")

    def on_trial_error(self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, **info: Any) -> None:
        """Print that a trial has failed."""
        self._print_line(trial.config["name"], "FAILED")

    def _print_line(self, name: str, text: str) -> None:
        length_now = sum(self._searcher.shares.values())
        length_done = length_now + self._searcher.share_finished_before()
        seconds_left = (time.monotonic() - self._started) / length_now * max(0.0, self._length - length_done)
        print(f"{length_done / self._length:4.0%}  {name}  {text}  {clock(seconds_left)} left", flush=True)
