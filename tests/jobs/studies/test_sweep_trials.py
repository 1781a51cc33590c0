"""Trials of a sweep are ended early by rules, and a sweep that is continued asks for the same trials, whatever failed."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.tune.schedulers import MedianStoppingRule
from ray.tune.search import Searcher

from jobs.engine.command_line import parse_preset
from jobs.engine.watch import Validation
from jobs.studies.sweeps.plan import Sweep
from jobs.studies.sweeps.presets import PRESETS
from jobs.studies.sweeps.round_record import RoundRecord
from jobs.studies.sweeps.rounds import make_rounds
from jobs.studies.sweeps.schedulers import SchedulerRace, make_asha
from jobs.studies.sweeps.stopping import BandRule, Halving, TrialWatch
from jobs.studies.trials.searcher import RoundSearcher
from jobs.studies.trials.trial import Outcomes, Rounds, Trial

BAND = (0.7, 1.0)
RULE = BandRule(band=BAND, tau_min=0.001, tau_max=2.0, num_steps=600)


def validate(step: int, loss: float, tau: float = 0.8) -> Validation:
    """Returns a validation with the two scores that the rules read."""
    return Validation(step=step, scores={"tau_mean": tau, "cross_entropy_tau": loss})


def make_course(*taus: float) -> list[Validation]:
    """Returns validations with these mean temperatures, one every 50 steps."""
    return [validate(50 * number, 5.0, tau) for number, tau in enumerate(taus, start=1)]


def find_stop(rule: BandRule, validations: list[Validation]) -> tuple[int, str]:
    """Returns the step at which a rule ends a run, and the reason; step 0 if it does not."""
    for count in range(1, len(validations) + 1):
        if reason := rule.reason_to_stop(validations[:count]):
            return validations[count - 1].step, reason
    return 0, ""


@pytest.mark.parametrize(
    ("taus", "step", "reason"),
    [
        ([1.0, 1.05, 1.0, 0.95, 0.9, 0.85, 0.85, 0.85, 0.85, 0.85, 0.85, 0.85], 0, ""),
        ([1.9, 1.99, 1.99, 1.99, 1.99, 1.99], 300, "at the bound of its range"),
        ([1.2, 1.3, 1.35, 1.4, 1.45, 1.5], 300, "settles outside the band"),
        ([0.9, 0.6, 0.5, 0.45, 0.4, 0.38], 300, "settles outside the band"),
        # It is outside, but no farther than a temperature may still move in the steps that are left.
        ([0.9, 0.8, 0.7, 0.66, 0.64, 0.63, 0.64, 0.66, 0.68, 0.7, 0.71, 0.71], 0, ""),
        ([1.5, 1.45, 1.38, 1.3, 1.25, 1.22, 1.14, 1.06, 0.98], 0, ""),
        ([0.62] * 12, 450, "settles outside the band"),
        # In the first half of the steps it may be anywhere.
        ([1.3, 1.9, 0.2, 1.4, 1.2, 1.0, 0.9, 0.9, 0.9, 0.9], 0, ""),
    ],
)
def test_a_trial_is_cut_short_when_its_temperature_has_settled(taus: list[float], step: int, reason: str) -> None:
    stopped, why = find_stop(RULE, make_course(*taus))
    assert stopped == step
    assert reason in why


def test_a_loss_without_a_temperature_is_left_alone() -> None:
    validations = [Validation(step=step, scores={"mean_recall": 0.5}) for step in range(100, 700, 100)]
    assert find_stop(RULE, validations) == (0, "")


@given(st.lists(st.tuples(st.integers(0, 9), st.booleans(), st.floats(0.0, 10.0)), min_size=1, max_size=30))
def test_halving_lets_the_better_half_of_those_seen_go_on(arrivals: list[tuple[int, bool, float]]) -> None:
    halving = Halving(4, BAND)
    seen: dict[str, tuple[bool, float]] = {}
    for trial, is_inside, loss in arrivals:
        seen[str(trial)] = is_inside, -loss
        num_better = sorted(seen.values(), reverse=True).index((is_inside, -loss))
        goes_on = halving.goes_on(str(trial), [validate(1, 0.0), validate(2, loss, 0.8 if is_inside else 1.5)])
        assert goes_on == (num_better < math.ceil(len(seen) / 2))


def test_halving_looks_only_at_the_rung() -> None:
    halving = Halving(100, BAND)

    def goes_on(trial: str, *losses: float) -> bool:
        return halving.goes_on(trial, [validate(20 * number, loss) for number, loss in enumerate(losses, start=1)])

    assert goes_on("a", 2.0, 2.0, 1.1)
    assert goes_on("b", 2.0, 2.0)
    assert not goes_on("b", 1.1, 1.1, 2.0)
    assert goes_on("b", 1.1, 1.1, 2.0, 2.0)
    assert not halving.goes_on("c", [validate(50, 0.0, tau=1.5)])  # it is outside the band
    assert halving.goes_on("d", [validate(50, 1.0)])


@pytest.mark.parametrize("num_steps", [2, 3, 10, 300, 301])
def test_asha_compares_trials_once_at_half_of_their_steps(num_steps: int) -> None:
    race = SchedulerRace(make_asha(num_steps))
    half = math.ceil(num_steps / 2)
    steps = range(1, num_steps)
    best = [validate(step, 1.0) for step in steps]
    worse = [validate(step, 2.0) for step in steps]
    late = [validate(step, 2.0 if step < half else 0.5) for step in steps]
    assert all(race.goes_on("best", best[:count]) for count in steps)
    assert [race.goes_on("worse", worse[:count]) for count in steps] == [step < half for step in steps]
    assert all(race.goes_on("late", late[:count]) for count in steps)


def test_a_stop_is_final_and_validations_that_come_again_are_not_counted_twice() -> None:
    race = SchedulerRace(make_asha(100))
    assert race.goes_on("a", [validate(40, 1.0), validate(60, 1.0)])
    assert not race.goes_on("b", [validate(40, 1.0), validate(60, 2.0)])
    # The worker of the trial died and continues from its checkpoint.
    assert not race.goes_on("b", [validate(40, 1.0)])
    assert not race.goes_on("b", [validate(40, 1.0), validate(60, 2.0)])


def test_a_continued_sweep_does_not_end_trials_that_have_gone_on_before() -> None:
    race = SchedulerRace(make_asha(100))
    assert race.goes_on("a", [validate(50, 1.0), validate(90, 1.0)])
    # When it was at step 50, there was nothing to compare it with.
    assert race.goes_on("b", [validate(50, 2.0), validate(70, 2.0)])


def test_another_scheduler_that_decides_by_results_can_be_given() -> None:
    rule: Any = MedianStoppingRule(
        time_attr="step", metric="tau_mean", mode="min", grace_period=1, min_samples_required=2, min_time_slice=math.inf
    )
    race = SchedulerRace(rule)
    assert race.goes_on("a", [validate(10, 5.0, tau=0.7)])
    assert race.goes_on("b", [validate(10, 5.0, tau=0.8)])
    assert not race.goes_on("c", [validate(10, 5.0, tau=0.9)])


def test_a_trial_without_a_finite_loss_diverges() -> None:
    for watch in (TrialWatch(trial="a", rule=RULE), TrialWatch(trial="a")):
        validations = make_course(0.85, 0.85)
        assert watch.reason_to_stop(validations) == ""
        validations[-1] = validate(100, math.nan, tau=0.85)
        assert "it diverges: cross-entropy at τ is nan at step 100" in watch.reason_to_stop(validations)


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
    """Run some rounds, and return their record and the names of the trials that they ask for.

    `taus` maps the number of a trial to the mean temperature that it ends with; with NaN it fails.
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


@pytest.mark.parametrize(
    ("taus", "later"),
    [
        ({0: 1.9, 1: math.nan}, {0: 0.0, 1: 1.5}),
        # No later trial was trained, because all of them failed and were then mended.
        ({0: math.nan, 1: math.nan, 2: math.nan}, {0: 1.9}),
    ],
)
def test_a_failure_in_the_last_round_is_tried_again(
    taus: dict[int, float], later: dict[int, float], tmp_path: Path
) -> None:
    work = make_band_sweep(tmp_path)
    _, before = run_rounds(work, taus, len(taus))
    record, again = run_rounds(work, later, len(later))
    assert again == before[: len(later)]
    assert record.final_failures == {}


def test_trials_of_a_grid_run_to_their_end_unless_there_is_a_scheduler(tmp_path: Path) -> None:
    config: Any = PRESETS["gpt2-rho-lr-small"]()
    trials = next(make_rounds(Sweep(config=config, make_plan=no_plan, plans=[]), RoundRecord(str(tmp_path))))
    assert [trial.watch for trial in trials] == [None] * 16


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
