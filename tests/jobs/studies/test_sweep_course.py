"""A sweep that is continued asks for the same trials, whatever failed; errors of a later round come out."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from ray.tune.search import Searcher

from jobs.engine.command_line import parse_preset
from jobs.studies.sweeps.course import Course
from jobs.studies.sweeps.launch import Sweep, _rounds
from jobs.studies.sweeps.presets import PRESETS
from jobs.studies.trials.run import Outcomes, Rounds, Trial, _RoundSearch


def no_plan(config: Any) -> Any:
    raise AssertionError


def sweep(storage: Path) -> Sweep:
    words = ["gpt2-rho-lr-small", "--sweep.search", "band", "--sweep.budget", "5", "--base.run.storage", str(storage)]
    config, _ = parse_preset(PRESETS, [*words, "--base.tracking.no-enabled"], job="sweep", purpose="")
    Path(config.run.directory).mkdir(parents=True, exist_ok=True)
    return Sweep(config=config, make_plan=no_plan, plans=[])


def outcome(trial: Trial, tau: float) -> dict[str, Any]:
    content = {
        "num_steps": trial.config.run.num_steps,
        "stopped": "",
        "validation": {"tau_mean": tau, "cross_entropy_tau": 5.0},
        "validations": [],
    }
    Path(trial.config.run.directory).mkdir(parents=True, exist_ok=True)
    Path(trial.config.run.directory, "outcome.json").write_text(json.dumps(content))
    return content


def drive(work: Sweep, taus: dict[int, float], num_rounds: int) -> tuple[Course, list[list[str]]]:
    """The names that some rounds ask for; the number of a trial says what it ends with, NaN that it fails."""
    course = Course(work.config.run.directory)
    rounds = _rounds(work, course)
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
                finished[trial.name] = outcome(trial, tau)
        if len(asked) == num_rounds:
            return course, asked
        trials = rounds.send(Outcomes(finished=finished, failed=failed))


def test_a_failure_that_the_search_has_gone_on_from_stands(tmp_path: Path) -> None:
    """Outside the band, so that every round is one trial."""
    work = sweep(tmp_path)
    _, before = drive(work, {0: 1.9, 1: math.nan, 2: 1.7, 3: 1.6}, 4)
    # This time it would end well, and the search would go elsewhere.
    course, again = drive(work, {0: 0.0, 1: 1.5, 2: 1.4, 3: 1.3, 4: 1.2}, 3)
    assert again == [before[0], *before[2:]]
    (lost,) = before[1]
    assert course.settled == {lost: "OutOfMemoryError: killed"}
    assert set(course.points) == {name for names in before for name in names}


def test_a_failure_in_the_last_round_is_tried_again(tmp_path: Path) -> None:
    work = sweep(tmp_path)
    _, before = drive(work, {0: 1.9, 1: math.nan}, 2)
    course, again = drive(work, {0: 0.0, 1: 1.5}, 2)
    assert again == before
    assert course.settled == {}
    # So is one after which nothing was trained: all of them failed, and what was wrong has been mended.
    other = sweep(tmp_path / "other")
    _, before = drive(other, {0: math.nan, 1: math.nan, 2: math.nan}, 3)
    _, again = drive(other, {0: 1.9}, 1)
    assert again == before[:1]


def test_an_error_of_a_later_round_is_raised_not_swallowed(tmp_path: Path) -> None:
    """Tune logs what a searcher raises, asks it again, and ends with something else."""
    work = sweep(tmp_path)
    first = Trial(config=work.config.trial({"temperature.rho": 2.0}), make_plan=no_plan)

    def rounds() -> Rounds:
        yield [first]
        raise ValueError("the directory of the next trial is taken")

    search = _RoundSearch(rounds())
    assert search.suggest("a") not in (None, Searcher.FINISHED)
    outcome(first, 0.8)
    search.on_trial_complete("a")
    assert list(search.finished) == [first.name]
    assert search.suggest("b") == Searcher.FINISHED
    with pytest.raises(ValueError, match="is taken"):
        raise search.error or AssertionError
