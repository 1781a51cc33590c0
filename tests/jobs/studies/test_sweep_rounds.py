"""A sweep that is continued asks for the same trials, whatever failed, and errors of a later round are raised."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from ray.tune.search import Searcher

from jobs.engine.command_line import parse_preset
from jobs.studies.sweeps.plan import Sweep
from jobs.studies.sweeps.presets import PRESETS
from jobs.studies.sweeps.round_record import RoundRecord
from jobs.studies.sweeps.rounds import make_rounds
from jobs.studies.trials.searcher import RoundSearcher
from jobs.studies.trials.trial import Outcomes, Rounds, Trial


def no_plan(config: Any) -> Any:
    raise AssertionError


def make_band_sweep(storage: Path) -> Sweep:
    """Returns a band search with a budget of five trials, whose runs are stored below `storage`."""
    words = ["gpt2-rho-lr-small", "--sweep.search", "band", "--sweep.budget", "5", "--base.run.storage", str(storage)]
    config, _ = parse_preset(PRESETS, [*words, "--base.tracking.no-enabled"], job="sweep", purpose="")
    Path(config.run.directory).mkdir(parents=True, exist_ok=True)
    return Sweep(config=config, make_plan=no_plan, plans=[])


def write_outcome(trial: Trial, tau: float) -> dict[str, Any]:
    """Writes the outcome of a whole trial that ended with a mean temperature, and returns it."""
    content = {
        "num_steps": trial.config.run.num_steps,
        "stopped": "",
        "validation": {"tau_mean": tau, "cross_entropy_tau": 5.0},
        "validations": [],
    }
    Path(trial.config.run.directory).mkdir(parents=True, exist_ok=True)
    Path(trial.config.run.directory, "outcome.json").write_text(json.dumps(content))
    return content


def run_rounds(work: Sweep, taus: dict[int, float], num_rounds: int) -> tuple[RoundRecord, list[list[str]]]:
    """Runs some rounds, and returns their record and the names of the trials that they ask for.

    Args:
        work: the sweep.
        taus: number of a trial → mean temperature that it ends with; NaN: it fails.
        num_rounds: number of rounds to run.
    """
    record = RoundRecord(work.config.run.directory)
    rounds = make_rounds(work, record)
    asked: list[list[str]] = []
    finished: dict[str, Any] = {}
    failed: dict[str, str] = {}
    trials = next(rounds)
    while True:
        asked.append([trial.name for trial in trials])
        for trial in trials:
            path = Path(trial.config.run.directory, "outcome.json")
            tau = taus[sum(map(len, asked)) - 1]
            if path.exists():
                finished[trial.name] = json.loads(path.read_text())
            elif math.isnan(tau):
                failed[trial.name] = "OutOfMemoryError: killed"
            else:
                finished[trial.name] = write_outcome(trial, tau)
        if len(asked) == num_rounds:
            return record, asked
        trials = rounds.send(Outcomes(finished=finished, failed=failed))


def test_a_failure_that_the_search_has_gone_on_from_stands(tmp_path: Path) -> None:
    """All trials end outside the band, so that every round is a single trial."""
    work = make_band_sweep(tmp_path)
    _, before = run_rounds(work, {0: 1.9, 1: math.nan, 2: 1.7, 3: 1.6}, 4)
    # This time the failed trial would end well, and the search would continue elsewhere.
    record, again = run_rounds(work, {0: 0.0, 1: 1.5, 2: 1.4, 3: 1.3, 4: 1.2}, 3)
    assert again == [before[0], *before[2:]]
    (failed,) = before[1]
    assert record.final_failures == {failed: "OutOfMemoryError: killed"}
    assert set(record.points) == {name for names in before for name in names}


def test_a_failure_in_the_last_round_is_tried_again(tmp_path: Path) -> None:
    """A failure is also tried again if no later trial was trained, because all of them failed and were then mended."""
    work = make_band_sweep(tmp_path)
    _, before = run_rounds(work, {0: 1.9, 1: math.nan}, 2)
    record, again = run_rounds(work, {0: 0.0, 1: 1.5}, 2)
    assert again == before
    assert record.final_failures == {}
    other = make_band_sweep(tmp_path / "other")
    _, before = run_rounds(other, {0: math.nan, 1: math.nan, 2: math.nan}, 3)
    _, again = run_rounds(other, {0: 1.9}, 1)
    assert again == before[:1]


def test_trials_of_a_grid_have_a_watch_only_if_there_is_a_scheduler(tmp_path: Path) -> None:
    """The default, no scheduler, leaves every trial of a grid to run to its end."""
    words = ["gpt2-rho-lr-small", "--base.run.storage", str(tmp_path), "--base.tracking.no-enabled"]
    config, _ = parse_preset(PRESETS, words, job="sweep", purpose="")
    trials = next(make_rounds(Sweep(config=config, make_plan=no_plan, plans=[]), RoundRecord(str(tmp_path))))
    assert len(trials) == 16
    assert all(trial.watch is None for trial in trials)


def test_an_error_of_a_later_round_is_raised_not_swallowed(tmp_path: Path) -> None:
    """Tune logs what a searcher raises, asks it again, and ends with something else."""
    work = make_band_sweep(tmp_path)
    first = Trial(config=work.config.trial({"temperature.rho": 2.0}), make_plan=no_plan)

    def rounds() -> Rounds:
        yield [first]
        raise ValueError("the directory of the next trial is taken")

    searcher = RoundSearcher(rounds())
    assert searcher.suggest("a") not in (None, Searcher.FINISHED)
    write_outcome(first, 0.8)
    searcher.on_trial_complete("a")
    assert list(searcher.finished) == [first.name]
    assert searcher.suggest("b") == Searcher.FINISHED
    with pytest.raises(ValueError, match="is taken"):
        raise searcher.error or AssertionError
