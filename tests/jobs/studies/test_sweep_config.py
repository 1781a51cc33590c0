"""Every point of a sweep becomes a run, wrong values are named, and the chosen run is the best one in the band."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pytest

from jobs.engine.fields import configuration_hash, fixed_values, with_fields
from jobs.studies.sweeps.launch import Sweep
from jobs.studies.sweeps.presets import PRESETS
from jobs.studies.sweeps.report import Row, as_markdown, as_page, choose, make_row

BAND = (0.7, 1.0)


def sweep(base: dict[str, Any] | None = None, **changes: Any) -> Any:
    config: Any = PRESETS["gpt2-rho-lr-small"]()
    return replace(config, base=with_fields(config.base, base or {}), sweep=replace(config.sweep, **changes))


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_grids_of_sixteen_runs(name: str) -> None:
    config = PRESETS[name]()
    trials = [(point, config.trial(point)) for point in next(config.start())]
    assert len({trial.run.name for _, trial in trials}) == len({configuration_hash(trial) for _, trial in trials}) == 16
    for point, trial in trials:
        assert trial.temperature.rho == point["temperature.rho"]
        assert trial.temperature.target_tau is None  # a steered ρ would not be the ρ of the point
        assert trial.optimizer.learning_rate_tempnet == point["optimizer.learning_rate_tempnet"]
        assert trial.run.directory == f"{config.run.directory}/{trial.run.name}"
        assert trial.run.prepared_directory == config.run.prepared_directory


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"axes": ("temperature.roh=1,2",)}, "there is no field temperature.roh: did you mean temperature.rho"),
        ({"axes": ("temperature.loss=1,2",)}, "temperature.loss is not a number but str"),
        ({"axes": ("optimizer.batch-size=8.5",)}, "optimizer.batch_size = 8.5 must be a whole number"),
        (
            {"axes": ("optimizer.micro-batch-size=5",)},
            "sweep.axes: a worker's share of the batch, 16, is not divisible",
        ),
        ({"axes": ("run.log-every=2,3",)}, "run.log_every does not change the outcome of a run"),
        ({"axes": ("workers.num-workers=1,2",)}, "workers.num_workers does not change the outcome of a run"),
        ({"axes": ("temperature.rho=a",)}, "temperature.rho=a is not FIELD=VALUE,VALUE"),
        ({"axes": ("temperature.rho=nan",)}, "temperature.rho=nan must be finite"),
        ({"axes": ("optimizer.learning-rate-base=1e-3,0.001",)}, "optimizer.learning_rate_base lists 0.001 twice"),
        ({"axes": ("run.num-steps=4,8", "run.num_steps=2")}, "sweep.axes names 'run.num_steps' twice"),
        ({"axes": ()}, "sweep.axes is empty"),
        ({"band": (1.0, 0.5)}, "sweep.band = (1.0, 0.5) must be two rising positive numbers"),
        ({"num_trials": 0}, "sweep.num_trials = 0 must be at least 1"),
        ({"budget": 0.5}, "sweep.budget = 0.5 must be at least 1, for one whole trial"),
        ({"budget": math.inf}, "sweep.budget = inf must be at least 1, for one whole trial, and finite"),
        ({"search": "band", "band": (1.5, 2.0)}, "sweep.band = (1.5, 2.0) must lie between τ₀ = 0.001 and τ_max = 2"),
        ({"scheduler": "asha", "band": (1.5, 2.0)}, "sweep.band = (1.5, 2.0) must lie between τ₀ = 0.001 and"),
        ({"search": "band", "base": {"temperature.loss": "ce"}}, "no temperature is learned: choose grid or random"),
        ({"search": "band", "scheduler": "asha"}, "band ends trials by rules of its own: choose grid or random"),
        ({"search": "optuna"}, "needs the package optuna, which is not installed: choose band, grid or random"),
        ({"search": "band", "axes": ("run.num-steps=100,200",)}, "search = band compares trials after the same number"),
        ({"scheduler": "median", "base": {"validation.every": 151}}, "may leave none there: choose at most 150"),
        ({"scheduler": "pbt", "base": {"validation.every": 76}}, "may leave no validation there: choose at most 75"),
        ({"scheduler": "pbt", "axes": ("temperature.hidden-size=32,64",)}, "but temperature.hidden_size shapes its"),
        ({"scheduler": "pbt", "axes": ("run.seed=1,2",)}, "run.seed shapes its weights or orders its data"),
        ({"scheduler": "pbt", "axes": ("temperature.rho=2",)}, "pbt needs at least 2 runs"),
        ({"num_generations": 1}, "sweep.num_generations = 1 must be at least 2"),
    ],
)
def test_wrong_values_are_refused_with_their_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        sweep(**changes)


def test_seeds_and_numbers_of_steps_are_axes_too() -> None:
    config = sweep(axes=("run.seed=3,20240102", "run.num-steps=40"))
    trials = [config.trial(point).run for point in next(config.start())]
    assert [run.name for run in trials] == ["seed3-num_steps40", "seed20240102-num_steps40"]
    assert [(run.seed, run.num_steps) for run in trials] == [(3, 40), (20240102, 40)]
    assert all(isinstance(value, int) for run in trials for value in (run.seed, run.num_steps))
    for search in ("random", "band"):
        config = sweep(search=search, axes=("temperature.hidden-size=32,257",))
        sizes = [config.trial(point).temperature.hidden_size for point in next(config.start())]
        assert all(isinstance(size, int) and 32 <= size <= 257 for size in sizes)


def test_a_scheduler_needs_no_learned_temperature_and_leaves_the_hash_of_a_sweep_as_it_is() -> None:
    sweep({"temperature.loss": "ce"}, scheduler="asha", band=(1.5, 2.0))
    assert configuration_hash(sweep()) == configuration_hash(sweep(scheduler="asha"))
    assert "sweep.scheduler" not in fixed_values(sweep())


def make_rows(*scores: tuple[float, float] | None) -> list[Row]:
    """Return a row for each (mean temperature, loss); None stands for a trial that failed."""
    rows = []
    for number, score in enumerate(scores):
        outcome = {"validation": {"tau_mean": score[0], "cross_entropy_tau": score[1]}} if score else None
        failure = "" if score else "OSError: gone"
        rows.append(make_row(f"trial{number}", {"temperature.rho": float(number)}, outcome, failure, BAND))
    return rows


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"axes": ("temperature.rho=2,3", "optimizer.learning-rate-tempnet=1e-3,3e-3")}, True),
        ({"axes": ("run.seed=0,1",)}, False),  # another order of the data
        ({"axes": ("optimizer.batch-size=16,32",)}, False),  # other batches
        ({"axes": ("temperature.rho=2",)}, False),  # one network
        ({"scheduler": "asha"}, False),
        ({"search": "optuna"}, False),
        ({"num_side_by_side": 1}, False),
        ({"base": {"model.freeze": False}}, False),
    ],
    ids=str,
)
def test_trials_share_a_frozen_base_where_they_read_the_same_batches(
    changes: dict[str, Any], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jobs.studies.sweeps.config.importlib.util.find_spec", lambda name: name)  # Optuna is optional
    config: Any = PRESETS["frozen-rho-lr-small"]()
    base = with_fields(config.base, changes.pop("base", {}))
    config = replace(config, base=base, sweep=replace(config.sweep, **changes))
    assert Sweep(config=config, plans=[]).shares_base == expected


def test_the_band_comes_first_and_then_the_loss() -> None:
    rows = make_rows((0.5, 1.0), (0.75, 3.0), (0.95, 2.0), None)
    best, why = choose(rows, BAND)
    assert best is rows[2]
    assert "of the 2 trials in the band it has the best cross-entropy at τ" in why
    rows = make_rows((0.2, 1.0), (1.1, 3.0), None)
    best, why = choose(rows, BAND)
    assert best is rows[1], "the nearest to the band"
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
