"""Tests of the analyses of curves: their figures are those of scipy, and what does not fit together is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlflow import MlflowClient
from scipy.stats import t as student

from jobs.scoring.analyses.config import Openness, Phase, TauMax
from jobs.scoring.analyses.curves import average, collect
from jobs.scoring.analyses.openness import analyse_openness
from jobs.scoring.analyses.phase import analyse_phase
from tempnet.statistics import mean_interval


def write_outcome(run: Path, rows: dict[int, dict[str, float]], **others: Any) -> str:
    """Write the part of a run's outcome that the analyses read, and return the directory of the run."""
    run.mkdir(parents=True)
    validations = [{"step": step, "scores": scores} for step, scores in rows.items()]
    outcome = {"validations": validations, "mlflow_run_id": f"id-{run.name}", **others}
    (run / "outcome.json").write_text(json.dumps(outcome))
    return str(run)


def scores(spearman: float, tau: float) -> dict[str, float]:
    return {"tau_entropy_spearman": spearman, "tau_mean": tau, "cross_entropy": 5.0}


def test_the_interval_of_a_mean_is_that_of_scipy() -> None:
    values = np.random.default_rng(0).normal(3.0, 2.0, 7)
    mean, half = mean_interval(list(values))
    low, high = student.interval(0.95, 6, loc=values.mean(), scale=values.std(ddof=1) / 7**0.5)
    assert mean == pytest.approx((low + high) / 2)
    assert half == pytest.approx((high - low) / 2)
    assert mean_interval([4.0]) == (4.0, None)
    with pytest.raises(ValueError, match="at least one value"):
        mean_interval([])


def test_curves_hold_the_figures_at_every_value_in_order(tmp_path: Path) -> None:
    samples = {0.5: [{"a": 1.0, "b": 4.0}, {"a": 3.0, "b": 4.0}], 2.0: [{"a": 5.0, "b": 1.0}]}
    curves = collect("ρ", [0.5, 2.0], ["first", "second"], lambda x: average(samples[x], {"a": "first", "b": "second"}))
    assert curves.figures["first"] == [mean_interval([1.0, 3.0]), (5.0, None)]
    assert curves.figures["second"] == [(4.0, 0.0), (1.0, None)]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in curves.table().splitlines()]
    assert rows[-2:] == [["0.5", "2 ± 13", "4 ± 0"], ["2", "5", "1"]]
    assert curves.values()["points"][1] == {
        "ρ": 2.0,
        "first": {"mean": 5.0, "half_width": None},
        "second": {"mean": 1.0, "half_width": None},
    }
    curves.plot("title", tmp_path / "curve.png", is_logarithmic=True)
    assert (tmp_path / "curve.png").stat().st_size > 1000


def test_openness_along_the_training_of_several_seeds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = tuple(
        write_outcome(
            tmp_path / f"seed-{seed}", {50: scores(0.1 * seed, 1.0), 100: scores(-0.9 - 0.01 * seed, 0.5 + seed)}
        )
        for seed in range(3)
    )
    output = tmp_path / "output"
    curves = analyse_openness(Openness(runs=runs, output=str(output), storage=str(tmp_path / "store")))
    assert curves.xs == [50, 100]
    assert curves.figures["Spearman(τ, entropy at τ = 1)"][1] == mean_interval([-0.9, -0.91, -0.92])
    assert curves.figures["mean τ"] == [(1.0, 0.0), mean_interval([0.5, 1.5, 2.5])]
    said = capsys.readouterr().out
    assert "Spearman(τ, entropy) is 0.1 ± 0.25 at step 50 and -0.91 ± 0.025 at step 100; 3 runs" in said
    assert json.loads((output / "results.json").read_text())["num_runs"] == 3
    assert {"results.md", "training.png"} <= {file.name for file in output.iterdir()}
    client = MlflowClient(f"sqlite:///{tmp_path}/store/mlflow.db")
    (experiment,) = [found for found in client.search_experiments() if found.name == "analyses"]
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.data.metrics["spearman"] == pytest.approx(-0.91)


def test_runs_that_do_not_fit_together_are_refused(tmp_path: Path) -> None:
    first = write_outcome(tmp_path / "first", {50: scores(0.1, 1.0)})
    other = write_outcome(tmp_path / "other", {60: scores(0.1, 1.0)})
    images = write_outcome(tmp_path / "images", {50: {"tau_mean": 0.02}}, rho=1.0, num_pairs_train=9)
    output = {"output": str(tmp_path / "output"), "storage": str(tmp_path / "store")}
    with pytest.raises(ValueError, match=r"other was validated at steps \[60\], and .*first at \[50\]"):
        analyse_openness(Openness(runs=(first, other), **output))
    with pytest.raises(ValueError, match="images has no validation of temperatures of a language model"):
        analyse_openness(Openness(runs=(images,), **output))
    with pytest.raises(
        FileNotFoundError, match=r"nowhere is no directory of a finished run: it holds no outcome\.json"
    ):
        analyse_openness(Openness(runs=(str(tmp_path / "nowhere"),), **output))
    phase = {"images": "images", "label": "number", **output}
    with pytest.raises(
        ValueError, match="has 1 finished trials of dual encoders with a ρ: at least 2 values of ρ are needed"
    ):
        analyse_phase(Phase(sweep=str(tmp_path), **phase))
    with pytest.raises(FileNotFoundError, match="nowhere: there is no such directory"):
        analyse_phase(Phase(sweep=str(tmp_path / "nowhere"), **phase))
    assert not (tmp_path / "output").exists()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tau_max": (1.0,)}, "tau_max = 1 must be at least two rising positive numbers"),
        ({"tau_max": (1.0, 1.0)}, "tau_max = 1 1 must be"),
        ({"tau_max": (0.0, 1.0)}, "tau_max = 0 1 must be"),
        ({"models": ()}, "models is empty: it must name at least one model"),
        ({"wikitext": ""}, "wikitext is empty: it must name a text file"),
        ({"batch_size": 0}, "batch_size = 0 must be at least 1"),
    ],
)
def test_a_wrong_value_is_refused_with_its_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TauMax(**{"models": ("m",), "wikitext": "text", "output": "o", **values})
