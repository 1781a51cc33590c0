"""Analyses of figures over a quantity that was varied: a table, a picture and one line for each of them.

openness    how τ comes to follow the entropy of a context along the training of a language model
tau-max     the perplexity of a text at several values of τ_max at inference (TempNet, Figure 9)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jobs.engine.config import TrackingSection
from jobs.engine.report import markdown_table, picture
from jobs.engine.tracking import resolve_uri
from jobs.scoring.analyses.config import Analysis, Openness, TauMax
from jobs.scoring.results import publish_findings
from jobs.scoring.units import absolute_output
from pipelines.storage import join, read_json
from tempnet.intervals import Interval, mean_interval

Points = Mapping[float, Mapping[str, Interval]]
"""Value of the quantity, rising → name of each figure → the figure."""


def publish_curves(
    config: Analysis,
    title: str,
    quantity: str,
    points: Points,
    *,
    values: Mapping[str, Any],
    settings: Mapping[str, Any],
    is_logarithmic: bool = False,
    **others: Any,
) -> None:
    """Publish figures at all values of a quantity, with other values; for the other arguments see `publish_findings`."""
    names = list(next(iter(points.values())))

    def plot(path: Path) -> None:
        with picture(path, len(names), figsize=(7, 0.8 + 2.2 * len(names)), sharex=True, title=title) as rows:
            for axes, name in zip(rows[:, 0], names, strict=True):
                means, halves = np.array([row[name] for row in points.values()]).T
                axes.errorbar(list(points), means, yerr=np.nan_to_num(halves), marker="o", capsize=3)
                axes.set_ylabel(name)
                axes.grid(alpha=0.3)
            if is_logarithmic:
                rows[-1, 0].set_xscale("log")
            rows[-1, 0].set_xlabel(quantity)

    json = [{quantity: x, **{name: point.as_json() for name, point in row.items()}} for x, row in points.items()]
    publish_findings(
        config,
        title,
        values={"quantity": quantity, "points": json, **values},
        table=markdown_table(
            [[quantity, *names], *([f"{x:g}", *map(show, row.values())] for x, row in points.items())]
        ),
        plot=plot,
        settings={"analysis": title, **settings},
        **others,
    )


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


def analyse_openness(config: Openness) -> Points:
    """Run the analysis, which reads what the runs have left in their directories, and return the figures over the step."""
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
    first, last = (rows[step][_OPENNESS_FIGURES["tau_entropy_spearman"]] for step in (steps[0], steps[-1]))
    publish_curves(
        config,
        "τ and the openness of a context along the training",
        "step",
        rows,
        uri=uri,
        values={"num_runs": len(scores)},
        conclusion=(
            f"Spearman(τ, entropy) is {show(first)} at step {steps[0]:g} and {show(last)} at step {steps[-1]:g}; "
            f"{len(scores)} runs"
        ),
        plot_file="training.png",
        metrics={"spearman": last.mean},
        settings={"runs": {run: outcome["mlflow_run_id"] for run, outcome in outcomes.items()}},
        source=config.runs[0],
    )
    return rows


def _read_outcome(run: str) -> Mapping[str, Any]:
    outcome = read_json(join(run, "outcome.json"))
    if outcome is None:
        raise FileNotFoundError(f"runs: {run} is no directory of a finished run: it holds no outcome.json")
    if not outcome["validations"] or "tau_entropy_spearman" not in outcome["validations"][-1]["scores"]:
        raise ValueError(f"runs: {run} has no validation of temperatures of a language model")
    return outcome


def analyse_tau_max(config: TauMax) -> Points:
    """Run or continue the analysis, and return the figures over τ_max: means over the models."""
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

    def averages(temperature: str, **figures: str) -> dict[str, Interval]:
        columns = [column for column in results.columns if column.parameters["temperature"] == temperature]
        titles = {f"wikitext/{name}": title for name, title in figures.items()}
        return average([column.metrics for column in columns], titles)

    figures = {"word_perplexity": "word perplexity", "tau_mean": "mean τ"}
    rows = {value: averages(name, **figures) for value, name in names.items()}
    at_one = averages("one", word_perplexity="word perplexity")["word perplexity"]
    best = min(rows, key=lambda value: rows[value]["word perplexity"].mean)
    lowest, mean_tau = (rows[best][name] for name in ("word perplexity", "mean τ"))
    publish_curves(
        config,
        "perplexity over τ_max at inference",
        "τ_max",
        rows,
        uri=uri,
        values={"num_models": len(config.models), "word perplexity at τ = 1": at_one.mean},
        conclusion=(
            f"lowest word perplexity {show(lowest)} at τ_max = {best:g}, where the mean τ is {show(mean_tau)}; "
            f"{show(at_one)} at τ = 1; {len(config.models)} models"
        ),
        plot_file="tau_max.png",
        metrics={"word_perplexity": lowest.mean, "tau_max": best},
        settings={
            "models": list(config.models),
            "text": config.wikitext,
            "τ_max": list(config.tau_max),
            "figures": results.identity,  # other weights or another text at the same paths are another run in MLflow
        },
        source=config.wikitext,
    )
    return rows
