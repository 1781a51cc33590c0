"""Trials of a sweep are ended early by rules, and a band search asks Tune for the trials that it would ask for itself."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.tune.search import Searcher

from jobs.engine.checkpoint import RunState
from jobs.engine.command_line import parse_preset
from jobs.engine.launch import claim_directory, find_outcome
from jobs.engine.resumption import checkpoint_name, write_file_list
from jobs.engine.run_list import list_runs
from jobs.engine.worker import Validation
from jobs.studies import trials
from jobs.studies.sweeps.band_search import PointResult, search_band
from jobs.studies.sweeps.config import name_of
from jobs.studies.sweeps.launch import _finish_stopped, _read_runs, match_runs
from jobs.studies.sweeps.presets import PRESETS
from jobs.studies.sweeps.report import make_row
from jobs.studies.sweeps.tuning import BandRule, BandSearch, Halving, RuleStopper

BAND = (0.7, 1.0)
RULE = BandRule(band=BAND, tau_min=0.001, tau_max=2.0, num_steps=600)


def validate(step: int, loss: float, tau: float = 0.8) -> Validation:
    """Returns a validation with the two scores that the rules read."""
    return Validation(step=step, scores={"tau_mean": tau, "cross_entropy_tau": loss})


@pytest.mark.parametrize(
    ("taus", "step", "reason"),
    [
        ([1.0, 1.05, 1.0, 0.95, 0.9, 0.85, 0.85, 0.85, 0.85, 0.85, 0.85, 0.85], 0, ""),
        ([1.9, 1.99, 1.99, 1.99, 1.99, 1.99], 300, "at the bound of its range"),
        ([1.2, 1.3, 1.35, 1.4, 1.45, 1.5], 300, "settles outside the band"),
        # It is outside, but no farther than a temperature may still move in the steps that are left.
        ([0.9, 0.8, 0.7, 0.66, 0.64, 0.63, 0.64, 0.66, 0.68, 0.7, 0.71, 0.71], 0, ""),
        ([0.62] * 12, 450, "settles outside the band"),
        # In the first half of the steps it may be anywhere.
        ([1.3, 1.9, 0.2, 1.4, 1.2, 1.0, 0.9, 0.9, 0.9, 0.9], 0, ""),
    ],
)
def test_a_trial_is_cut_short_when_its_temperature_has_settled(taus: list[float], step: int, reason: str) -> None:
    course = [validate(50 * number, 5.0, tau) for number, tau in enumerate(taus, start=1)]
    reasons = {one.step: why for one in course if (why := RULE.reason_to_stop([one]))}
    assert min(reasons, default=0) == step
    assert reason in reasons.get(step, "")
    assert (
        RULE.reason_to_stop([Validation(step=600, scores={"mean_recall": 0.5})]) == ""
    )  # a loss without a temperature


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
    assert not halving.goes_on("e", [validate(50, 2.5)])  # of five seen, three are better


def report(search: BandSearch, stopper: RuleStopper, trial: str, taus: list[float], losses: list[float]) -> int:
    """Let a trial report a validation every 50 steps until it is ended, tell the search, and return its last step."""
    for number, (tau, loss) in enumerate(zip(taus, losses, strict=True), start=1):
        result = {"step": 50 * number, "tau_mean": tau, "cross_entropy_tau": loss}
        if stopper(trial, result):
            break
    search.on_trial_complete(trial, result)
    return int(result["step"])


def test_a_band_search_in_the_hands_of_tune_is_the_search_by_rounds() -> None:
    """One trial ends in the band, then three compete, of which the worst is ended at half, then the best goes on."""
    axes = {"temperature.rho": [2.0, 4.0], "optimizer.learning_rate_tempnet": [1e-3, 2e-3, 3e-3, 4e-3]}
    search = BandSearch(axes, band=BAND, num_steps=600, budget=5.0)
    stopper = RuleStopper(RULE, search)
    first = search.suggest("a")
    assert search.suggest("b") is None  # the next round depends on this one
    assert report(search, stopper, "a", [0.85] * 12, [5.0] * 12) == 600
    points = {trial: search.suggest(trial) for trial in "bcd"}
    assert search.suggest("e") is None
    assert report(search, stopper, "c", [0.85] * 12, [6.0] * 12) == 300
    assert "other trials are better at step 300" in stopper.reasons["c"]
    assert report(search, stopper, "b", [0.85] * 12, [4.0] * 12) == 600
    search.on_trial_complete("d", error=True)
    last = search.suggest("e")
    assert report(search, stopper, "e", [0.85] * 12, [9.0] * 12) == 600  # it was chosen alone, and does not compete
    rounds = search_band(axes, band=BAND, budget=5.0)
    assert next(rounds) == [first]
    assert rounds.send([PointResult(point=dict(first), tau_mean=0.85, loss=5.0, share=1.0)]) == list(points.values())
    shares, losses = {"b": 1.0, "c": 0.5, "d": 1.0}, {"b": 4.0, "c": 6.0, "d": math.nan}
    results = [
        PointResult(
            point=dict(point), tau_mean=math.nan if trial == "d" else 0.85, loss=losses[trial], share=shares[trial]
        )
        for trial, point in points.items()
    ]
    assert rounds.send(results) == [last]
    assert search.suggest("f") == Searcher.FINISHED


@pytest.mark.parametrize("is_continued", [False, True])
def test_trials_compete_with_those_that_ended_before_the_sweep_was_continued(is_continued: bool) -> None:
    axes = {"temperature.rho": [2.0, 4.0], "optimizer.learning_rate_tempnet": [1e-3, 2e-3, 3e-3, 4e-3]}
    search, finished = BandSearch(axes, band=BAND, num_steps=600, budget=5.0), list[str]()
    stopper = RuleStopper(RULE, search, finished)
    search.suggest("a")
    assert report(search, stopper, "a", [0.85] * 12, [5.0] * 12) == 600
    for trial in "bc":
        search.suggest(trial)
    if is_continued:
        finished.append(name_of(search.points["b"]))
        end = {"step": 300, "tau_mean": 0.85, "cross_entropy_tau": 6.0}
        assert not stopper("b", end)
        search.on_trial_complete("b", end)
    else:
        assert report(search, stopper, "b", [0.85] * 12, [6.0] * 12) == 300
    assert report(search, stopper, "c", [0.85] * 12, [5.5] * 12) == 600  # it is the second of three


def test_the_error_of_a_trial_that_went_on_from_another_is_that_of_the_run_it_was() -> None:
    axes, point, other = ["temperature.rho"], {"temperature.rho": 2.4}, {"temperature.rho": 3.0}
    results = [
        SimpleNamespace(config=point, error=ValueError("lost"), metrics={"trial_id": "a"}),
        SimpleNamespace(config=other, error=None, metrics={"trial_id": "b"}),
        SimpleNamespace(config={"temperature.rho": 4.0}, error=ValueError("refused"), metrics=None),
    ]
    found: Any = {"rho2.4-from-75-c0ffee": (point, None), "rho3": (other, None), "rho2": ({"temperature.rho": 2.0}, {})}
    runs, errors, early = match_runs(results, found, axes, {"a": "x", "b": "diverges"})
    assert list(runs) == ["rho2.4-from-75-c0ffee", "rho3", "rho4", "rho2"]
    assert errors == {"rho2.4-from-75-c0ffee": "lost", "rho4": "refused"}
    assert early == {"rho3": "diverges"}


@pytest.mark.parametrize("rule", [RULE, None])
def test_a_trial_without_a_finite_loss_diverges(rule: BandRule | None) -> None:
    stopper = RuleStopper(rule)
    assert not stopper("a", {"step": 50, "tau_mean": 0.85, "cross_entropy_tau": 5.0})
    assert not stopper("a", {"step": 75, "checkpoint_path": "/x"})  # a checkpoint without a validation
    assert stopper("a", {"step": 100, "tau_mean": 0.85, "cross_entropy_tau": math.nan})
    assert stopper.reasons == {"a": "it diverges: cross-entropy at τ is nan at step 100"}


@pytest.fixture
def config(tmp_path: Path) -> Any:
    words = ["gpt2-rho-lr-small", "--base.run.storage", str(tmp_path), "--base.tracking.no-enabled"]
    return parse_preset(PRESETS, words, job="sweep", purpose="")[0]


def test_a_run_that_tune_has_ended_gets_the_outcome_of_its_newest_checkpoint(config: Any) -> None:
    points = next(config.start())[:2]
    stopped, begun = (config.trial(point) for point in points)
    for trial in (stopped, begun):
        claim_directory(trial)
    for step in (60, 90):
        directory = Path(stopped.run.directory, checkpoint_name(step))
        directory.mkdir()
        validations = [
            (seen, {"tau_mean": 0.9, "cross_entropy_tau": 6.0 - seen / 100}) for seen in range(30, step + 1, 30)
        ]
        state = RunState(step=step, world_size=1, validations=validations)
        (directory / "state.json").write_text(json.dumps(asdict(state)))
        write_file_list(directory, rank=0, world_size=1, group="")
    (directory / "state.json").write_text("")  # the upload of the newest did not end
    assert {name: outcome for name, (_, outcome) in _read_runs(config).items()} == {
        stopped.run.name: None, begun.run.name: None
    }  # fmt: skip
    assert _finish_stopped(config, begun.run.name, "why", None) is None
    outcome = _finish_stopped(config, stopped.run.name, "others are better", None)
    runs = _read_runs(config)
    assert runs[stopped.run.name] == (points[0], outcome)
    row = make_row(stopped.run.name, *runs[stopped.run.name], "", BAND)
    assert (row.num_steps, row.stopped, row.loss, row.is_in_band) == (60, "others are better", 5.4, False)
    assert [step for step, _, _ in row.history] == [30, 60]
    # When the sweep is started again, the run counts as finished.
    assert find_outcome(stopped) == outcome


def test_a_trial_waits_for_mlflow(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[Any] = [ConnectionError("MLflow does not answer")] * 2 + ["a plan"]

    def make_plan(config: Any) -> Any:
        if isinstance(answer := answers.pop(0), Exception):
            raise answer
        return answer

    monkeypatch.setattr(trials, "make_plan", make_plan)
    assert trials.make_plan_in_outage(config.base, seconds_between=0.0) == "a plan"
    monkeypatch.setattr(trials, "_SECONDS_OF_OUTAGE", -1.0)
    answers.append(ConnectionError("MLflow does not answer"))
    with pytest.raises(ConnectionError, match="does not answer"):
        trials.make_plan_in_outage(config.base, seconds_between=0.0)


def test_a_trial_that_fails_beside_others_is_listed_as_failed(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its checkpoints and notes of progress are those of the group."""
    group = [trials.Trial(config=config.trial(point)) for point in next(config.start())[:2]]
    for trial in group:
        claim_directory(trial.config)
    monkeypatch.setattr(trials, "make_plan_in_outage", lambda config: None)
    monkeypatch.setattr(trials, "train_group", lambda *_, **__: {group[0].name: "the loss is nan"})
    assert [reason for _, reason in trials._run_side_by_side([group], {}, "", "")] == ["the loss is nan", ""]
    states = {run.name.rpartition("/")[2]: (run.state, run.failure) for run in list_runs(config.run.directory)}
    assert states[group[0].name][0] == "failed"
    assert states[group[0].name][1].endswith("at step 0: the loss is nan")
    assert states[group[1].name] == ("waiting", "")
