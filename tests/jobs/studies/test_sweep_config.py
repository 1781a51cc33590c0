"""Every point of a sweep becomes a run, wrong values are named, and the chosen run is the best one in the band."""

from __future__ import annotations

import math
from typing import Any

import pytest

from jobs.engine.command_line import parse_preset
from jobs.engine.identity import configuration_hash, fixed_values
from jobs.studies.sweeps.presets import PRESETS
from jobs.studies.sweeps.report import Row, as_markdown, as_page, choose, make_row

BAND = (0.7, 1.0)


def sweep(*arguments: str) -> Any:
    config, _ = parse_preset(PRESETS, ["gpt2-rho-lr-small", *arguments], job="sweep", purpose="")
    return config


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_grids_of_sixteen_runs(name: str) -> None:
    config = PRESETS[name]()
    trials = [(point, config.trial(point)) for point in next(config.start())]
    assert config.run.name == name
    assert len({trial.run.name for _, trial in trials}) == len({configuration_hash(trial) for _, trial in trials}) == 16
    for point, trial in trials:
        assert trial.temperature.rho == point["temperature.rho"]
        assert trial.temperature.target_tau is None  # a steered ρ would not be the ρ of the point
        assert trial.optimizer.learning_rate_tempnet == point["optimizer.learning_rate_tempnet"]
        assert trial.run.directory == f"{config.run.directory}/{trial.run.name}"
        assert trial.run.prepared_directory == config.run.prepared_directory


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sweep.axes", "temperature.roh=1,2"], "there is no field temperature.roh: did you mean temperature.rho"),
        (["--sweep.axes", "temperature.loss=1,2"], "temperature.loss is not a number but str"),
        (["--sweep.axes", "optimizer.batch-size=8.5"], "optimizer.batch_size = 8.5 must be a whole number"),
        (
            ["--sweep.axes", "optimizer.micro-batch-size=5"],
            "sweep.axes: a worker's share of the batch, 16, is not divisible",
        ),
        (["--sweep.axes", "optimizer.beta1=2"], "sweep.axes: optimizer.beta1 = 2 must lie in [0, 1]"),
        (["--sweep.axes", "run.log-every=2,3"], "run.log_every does not change the outcome of a run"),
        (["--sweep.axes", "temperature.rho=a"], "temperature.rho=a is not FIELD=VALUE,VALUE"),
        (["--sweep.axes", "temperature.rho=nan"], "temperature.rho=nan must be finite"),
        (["--sweep.axes", "temperature.rho=2,2"], "temperature.rho lists 2 twice"),
        (["--sweep.axes", "temperature.rho=2,2.0"], "temperature.rho lists 2 twice"),
        (["--sweep.axes", "optimizer.learning-rate-base=1e-3,0.001"], "optimizer.learning_rate_base lists 0.001 twice"),
        (["--sweep.axes", "run.num-steps=4,8", "run.num_steps=2"], "sweep.axes names 'run.num_steps' twice"),
        (["--sweep.axes", "temperature.rho"], "'temperature.rho' is not NAME=VALUE"),
        (["--sweep.axes"], "sweep.axes is empty"),
        (["--sweep.band", "1", "0.5"], "sweep.band = (1.0, 0.5) must be two rising positive numbers"),
        (["--sweep.num-trials", "0"], "sweep.num_trials = 0 must be at least 1"),
        (["--sweep.budget", "0.5"], "sweep.budget = 0.5 must be at least 1, for one whole trial"),
        (["--sweep.budget", "nan"], "sweep.budget = nan must be at least 1"),
        (["--sweep.budget", "inf"], "sweep.budget = inf must be at least 1, for one whole trial, and finite"),
        (
            ["--sweep.search", "band", "--sweep.band", "1.5", "2"],
            "sweep.band = (1.5, 2.0) must lie between τ₀ = 0.001 and τ_max = 2",
        ),
        (
            ["--sweep.search", "band", "--base.temperature.loss", "ce"],
            "with temperature.loss = ce no temperature is learned: choose grid or random",
        ),
        (
            ["--sweep.scheduler", "asha", "--sweep.search", "band"],
            "sweep.search = band ends trials by rules of its own: choose grid or random",
        ),
        (
            ["--sweep.scheduler", "asha", "--sweep.axes", "run.num-steps=100,200"],
            "sweep.axes varies run.num_steps: leave that axis out",
        ),
        (
            ["--sweep.scheduler", "asha", "--base.validation.every", "151"],
            "of their 300 steps, but validation.every = 151 may leave none there: choose at most 150",
        ),
        (
            ["--sweep.scheduler", "asha", "--sweep.band", "1.5", "2"],
            "sweep.band = (1.5, 2.0) must lie between τ₀ = 0.001 and τ_max = 2",
        ),
        (
            ["--sweep.scheduler", "pbt", "--base.validation.every", "76"],
            "4 parts of their 300 steps, but validation.every = 76 may leave no validation there: choose at most 75",
        ),
        (
            ["--sweep.scheduler", "pbt", "--sweep.axes", "temperature.hidden-size=32,64"],
            "pbt changes values while a model is trained, but temperature.hidden_size shapes its weights or orders",
        ),
        (
            ["--sweep.scheduler", "pbt", "--sweep.axes", "run.seed=1,2"],
            "pbt changes values while a model is trained, but run.seed shapes its weights or orders its data",
        ),
        (["--sweep.scheduler", "pbt", "--sweep.axes", "temperature.rho=2"], "pbt needs at least 2 runs"),
        (["--sweep.scheduler", "pbt", "--sweep.search", "band"], "choose grid or random, or scheduler none"),
        (["--sweep.num-generations", "1"], "sweep.num_generations = 1 must be at least 2"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_values_are_refused_with_their_name(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        sweep(*arguments)
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert message in said
    assert said.count("\n") == 1


def test_whole_fields_stay_whole() -> None:
    changed = sweep().trial({"run.num_steps": 40.0, "run.seed": 3.0, "validation.num_blocks": 8.0})
    assert (changed.run.num_steps, changed.run.seed, changed.validation.num_blocks) == (40, 3, 8)
    assert all(isinstance(value, int) for value in (changed.run.num_steps, changed.run.seed))


def test_seeds_and_numbers_of_steps_are_axes_too() -> None:
    config = sweep("--sweep.axes", "run.seed=3,4", "run.num-steps=40,80")
    trials = [(point, config.trial(point)) for point in next(config.start())]
    assert [(trial.run.seed, trial.run.num_steps) for _, trial in trials] == [(3, 40), (3, 80), (4, 40), (4, 80)]
    assert len({trial.run.directory for _, trial in trials}) == 4


def test_numbers_of_many_digits_have_names_of_their_own() -> None:
    config = sweep("--sweep.axes", "run.seed=20240101,20240102")
    assert [config.trial(point).run.name for point in next(config.start())] == ["seed20240101", "seed20240102"]


@pytest.mark.parametrize("kind", ["random", "band"])
def test_whole_fields_are_searched_in_whole_numbers(kind: str) -> None:
    config = sweep("--sweep.search", kind, "--sweep.axes", "temperature.hidden-size=32,257")
    sizes = [config.trial(point).temperature.hidden_size for point in next(config.start())]
    assert sizes
    assert all(isinstance(size, int) and 32 <= size <= 257 for size in sizes)


def test_a_loss_without_a_learned_temperature_may_have_a_scheduler() -> None:
    config = sweep("--sweep.scheduler", "asha", "--base.temperature.loss", "ce", "--sweep.band", "1.5", "2")
    assert config.sweep.scheduler == "asha"


def test_a_sweep_that_was_made_before_there_were_schedulers_continues() -> None:
    assert configuration_hash(sweep()) == configuration_hash(sweep("--sweep.scheduler", "asha"))
    assert "sweep.scheduler" not in fixed_values(sweep())


def make_rows(*scores: tuple[float, float] | None) -> list[Row]:
    """Returns a row for each (mean temperature, loss); None stands for a trial that failed."""
    trials = [(f"trial{number}", {"temperature.rho": float(number)}) for number in range(len(scores))]
    outcomes = {
        name: {"validation": {"tau_mean": score[0], "cross_entropy_tau": score[1]}}
        for (name, _), score in zip(trials, scores, strict=True)
        if score
    }
    return [
        make_row(name, point, outcomes.get(name), "" if name in outcomes else "OSError: gone", BAND)
        for name, point in trials
    ]


def test_the_band_comes_first_and_then_the_loss() -> None:
    rows = make_rows((0.5, 1.0), (0.75, 3.0), (0.95, 2.0), None)
    best, why = choose(rows, BAND)
    assert best is rows[2]
    assert "of the 2 trials in the band it has the best cross-entropy at τ" in why


def test_outside_the_band_the_nearest_is_chosen() -> None:
    rows = make_rows((0.2, 1.0), (1.1, 3.0), None)
    best, why = choose(rows, BAND)
    assert best is rows[1]
    assert "no trial lies in the band" in why
    assert choose(make_rows(None), BAND)[0] is None


def test_the_report_shows_what_failed() -> None:
    rows = make_rows((0.8, 1.0), None)
    text = as_markdown(rows, BAND, 400)
    assert "| → trial0 |" in text
    assert "FAILED" in text
    assert "Steps: 0, 0% of the 400 of the whole grid." in text
    content = as_page("a <sweep>", rows, BAND)
    assert "a &lt;sweep&gt;" in content
    assert "failed: OSError: gone" in content
    assert content.count("data:image/png;base64,") == 3
    assert "http" not in content
    assert math.isnan(rows[1].tau_mean)
