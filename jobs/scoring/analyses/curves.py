"""Analyses of figures over a quantity that was varied: a table, a picture and one line for each of them.

openness    how τ comes to follow the entropy of a context along the training of a language model
tau-max     the perplexity of a text at several values of τ_max at inference (TempNet, Figure 9)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from jobs.engine.config import TrackingSection
from jobs.engine.report import markdown_table, picture
from jobs.engine.tracking import resolve_uri
from jobs.scoring.analyses.config import Openness, TauMax
from jobs.scoring.results import publish_findings
from jobs.scoring.units import absolute_output
from pipelines.storage import join, read_json
from tempnet.intervals import Interval, mean_interval


@dataclass(frozen=True, slots=True, kw_only=True)
class Curves:
    """Some figures, each at all values of a quantity."""

    quantity: str
    points: Mapping[float, Mapping[str, Interval]]
    """Value of the quantity, rising → name of each figure → the figure."""

    def of(self, figure: str) -> list[Interval]:
        return [row[figure] for row in self.points.values()]

    def values(self) -> dict[str, Any]:
        points = [
            {self.quantity: x, **{name: point.as_json() for name, point in row.items()}}
            for x, row in self.points.items()
        ]
        return {"quantity": self.quantity, "points": points}

    def table(self) -> str:
        rows = [[f"{x:g}", *map(show, row.values())] for x, row in self.points.items()]
        return markdown_table([[self.quantity, *next(iter(self.points.values()))], *rows])

    def plot(self, title: str, path: Path, *, is_logarithmic: bool = False) -> None:
        names = list(next(iter(self.points.values())))
        size = (7, 0.8 + 2.2 * len(names))
        with picture(path, len(names), figsize=size, sharex=True, title=title) as rows:
            for axes, name in zip(rows[:, 0], names, strict=True):
                halves = [0.0 if math.isnan(half) else half for _, half in self.of(name)]
                axes.errorbar(
                    list(self.points), [mean for mean, _ in self.of(name)], yerr=halves, marker="o", capsize=3
                )
                axes.set_ylabel(name)
                axes.grid(alpha=0.3)
            if is_logarithmic:
                rows[-1, 0].set_xscale("log")
            rows[-1, 0].set_xlabel(self.quantity)


def show(point: Interval) -> str:
    mean, half = point
    return f"{mean:.4g}" + ("" if math.isnan(half) else f" ± {half:.2g}")


def average(samples: Sequence[Mapping[str, float]], figures: Mapping[str, str]) -> dict[str, Interval]:
    """Return the means of figures (key → name) over runs that differ by their seed, with intervals by Student's t."""
    return {name: mean_interval([sample[key] for sample in samples]) for key, name in figures.items()}


_OPENNESS_FIGURES = {
    "tau_entropy_spearman": "Spearman(τ, entropy at τ = 1)",
    "tau_mean": "mean τ",
    "cross_entropy": "cross-entropy at τ = 1",
}


def analyse_openness(config: Openness) -> Curves:
    """Run the analysis, which reads what the runs have left in their directories, and return the curves."""
    uri = resolve_uri(config.tracking, config.run.resolved_storage)
    outcomes = {run: _read_outcome(run) for run in config.runs}
    scores = {run: {row["step"]: row["scores"] for row in outcome["validations"]} for run, outcome in outcomes.items()}
    steps = sorted(scores[config.runs[0]])
    for run, of_run in scores.items():
        if sorted(of_run) != steps:
            raise ValueError(
                f"runs: {run} was validated at steps {sorted(of_run)}, and {config.runs[0]} at {steps}: they differ by more "
                "than their seed"
            )
    rows = {step: average([of_run[step] for of_run in scores.values()], _OPENNESS_FIGURES) for step in steps}
    curves = Curves(quantity="step", points=rows)
    found = curves.of(_OPENNESS_FIGURES["tau_entropy_spearman"])
    title = "τ and the openness of a context along the training"
    publish_findings(
        config,
        title,
        uri=uri,
        values={**curves.values(), "num_runs": len(scores)},
        table=curves.table(),
        conclusion=(
            f"Spearman(τ, entropy) is {show(found[0])} at step {steps[0]:g} and {show(found[-1])} at step {steps[-1]:g}; "
            f"{len(scores)} runs"
        ),
        plot=partial(curves.plot, title),
        plot_file="training.png",
        metrics={"spearman": found[-1].mean},
        settings={"analysis": title, "runs": {run: outcome["mlflow_run_id"] for run, outcome in outcomes.items()}},
        source=config.runs[0],
    )
    return curves


def _read_outcome(run: str) -> Mapping[str, Any]:
    outcome = read_json(join(run, "outcome.json"))
    if outcome is None:
        raise FileNotFoundError(f"runs: {run} is no directory of a finished run: it holds no outcome.json")
    if not outcome["validations"] or "tau_entropy_spearman" not in outcome["validations"][-1]["scores"]:
        raise ValueError(f"runs: {run} has no validation of temperatures of a language model")
    return outcome


_TAU_MAX_FIGURES = {"wikitext/word_perplexity": "word perplexity", "wikitext/tau_mean": "mean τ"}


def analyse_tau_max(config: TauMax) -> Curves:
    """Run or continue the analysis, and return the curves: means over the models."""
    from jobs.scoring.language_models.config import EvaluateConfig, Temperature
    from jobs.scoring.language_models.evaluate import evaluate

    uri = resolve_uri(config.tracking, config.run.resolved_storage)
    names = {value: Temperature.parse(f"tempnet:{value}").name for value in config.tau_max}
    evaluation = EvaluateConfig(
        models=config.models,
        temperatures=("one", *names.values()),
        wikitext=config.wikitext,
        batch_size=config.batch_size,
        workers=config.workers,
        storage=absolute_output(config.output),
        tracking=TrackingSection(enabled=False),
    )
    results = evaluate(evaluation)
    columns = results.columns

    def metrics_at(name: str) -> list[dict[str, float]]:
        return [column.metrics for column in columns if column.parameters["temperature"] == name]

    rows = {value: average(metrics_at(name), _TAU_MAX_FIGURES) for value, name in names.items()}
    at_one = average(metrics_at("one"), {"wikitext/word_perplexity": "word perplexity"})["word perplexity"]
    best = min(rows, key=lambda value: rows[value]["word perplexity"].mean)
    curves, title = Curves(quantity="τ_max", points=rows), "perplexity over τ_max at inference"
    settings = {"models": list(config.models), "text": config.wikitext, "τ_max": list(config.tau_max)}
    settings["figures"] = results.identity  # other weights or another text at the same paths are another run in MLflow
    publish_findings(
        config,
        title,
        uri=uri,
        values={**curves.values(), "num_models": len(config.models), "word perplexity at τ = 1": at_one.mean},
        table=curves.table(),
        conclusion=(
            f"lowest word perplexity {show(rows[best]['word perplexity'])} at τ_max = {best:g}, where the mean τ is "
            f"{show(rows[best]['mean τ'])}; {show(at_one)} at τ = 1; {len(config.models)} models"
        ),
        plot=partial(curves.plot, title),
        plot_file="tau_max.png",
        metrics={"word_perplexity": rows[best]["word perplexity"].mean, "tau_max": best},
        settings={"analysis": title, **settings},
        source=config.wikitext,
    )
    return curves
