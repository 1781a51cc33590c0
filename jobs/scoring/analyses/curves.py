"""Analyses of figures over a quantity that was varied: a table, a picture and one line for each of them.

openness    how τ comes to follow the entropy of a context along the training of a language model
tau-max     the perplexity of a text at several values of τ_max at inference (TempNet, Figure 9)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from jobs.engine.config import TrackingSection
from jobs.engine.tables import markdown_table
from jobs.engine.tracking import resolve_uri
from jobs.scoring.analyses.config import Openness, TauMax
from jobs.scoring.results import Findings, absolute_output, publish_findings
from pipelines.storage import join, read_json
from tempnet.intervals import Interval, mean_interval


@dataclass(frozen=True, slots=True, kw_only=True)
class Curves:
    """Some figures, each at all values of a quantity."""

    quantity: str
    """Name of the quantity."""
    xs: Sequence[float]
    """Its values, rising."""
    figures: Mapping[str, Sequence[Interval]]
    """Name of each figure → the figure at every value."""

    def values(self) -> dict[str, Any]:
        """Return the curves in the form of JSON."""
        return {
            "quantity": self.quantity,
            "points": [
                {
                    self.quantity: x,
                    **{name: points[number].as_json() for name, points in self.figures.items()},
                }
                for number, x in enumerate(self.xs)
            ],
        }

    def table(self) -> str:
        """Return a Markdown table with a row for every value of the quantity."""
        rows = [[self.quantity, *self.figures]]
        for number, x in enumerate(self.xs):
            rows.append([f"{x:g}", *(show(points[number]) for points in self.figures.values())])
        return markdown_table(rows)

    def plot(self, title: str, path: Path, *, is_logarithmic: bool = False) -> None:
        """Plot every figure over the quantity, one below the other, with 95 % intervals.

        Args:
            title: title of the picture.
            path: local file of the picture.
            is_logarithmic: whether the axis of the quantity is logarithmic.
        """
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt

        figure, rows = plt.subplots(
            len(self.figures),
            figsize=(7, 0.8 + 2.2 * len(self.figures)),
            sharex=True,
            squeeze=False,
            layout="constrained",
        )
        for axes, (name, points) in zip(rows[:, 0], self.figures.items(), strict=True):
            halves = [0.0 if math.isnan(half) else half for _, half in points]
            axes.errorbar(self.xs, [mean for mean, _ in points], yerr=halves, marker="o", capsize=3)
            axes.set_ylabel(name)
            axes.grid(alpha=0.3)
        if is_logarithmic:
            rows[-1, 0].set_xscale("log")
        rows[-1, 0].set_xlabel(self.quantity)
        figure.suptitle(title)
        figure.savefig(path, dpi=120)
        plt.close(figure)


def show(point: Interval) -> str:
    """Return a figure with its interval as text."""
    mean, half = point
    return f"{mean:.4g}" + ("" if math.isnan(half) else f" ± {half:.2g}")


def average(samples: Sequence[Mapping[str, float]], figures: Mapping[str, str]) -> dict[str, Interval]:
    """Return the means of figures over runs that differ by their seed, with 95 % intervals by Student's t.

    Args:
        samples: key of a figure → its value, for each run.
        figures: key → name of the figures.
    """
    return {name: mean_interval([sample[key] for sample in samples]) for key, name in figures.items()}


def collect(
    quantity: str, xs: Sequence[float], figures: Sequence[str], at: Callable[[float], Mapping[str, Interval]]
) -> Curves:
    """Return the curves of some figures.

    Args:
        quantity: name of the quantity that was varied.
        xs: its values, rising.
        figures: names of the figures.
        at: value of the quantity → name of each figure → the figure.
    """
    rows = [at(x) for x in xs]
    return Curves(quantity=quantity, xs=xs, figures={name: [row[name] for row in rows] for name in figures})


_OPENNESS_FIGURES = {
    "tau_entropy_spearman": "Spearman(τ, entropy at τ = 1)",
    "tau_mean": "mean τ",
    "cross_entropy": "cross-entropy at τ = 1",
}
_OPENNESS_TITLE = "τ and the openness of a context along the training"


def analyse_openness(config: Openness) -> Curves:
    """Run the analysis, which reads what the runs have left in their directories, and return the curves.

    Raises:
        FileNotFoundError: if a run is not finished.
        ValueError: if a run learned no temperature of a language model, or the runs were validated at other steps.
    """
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
    curves = collect(
        "step",
        steps,
        list(_OPENNESS_FIGURES.values()),
        lambda step: average([scores[run][step] for run in scores], _OPENNESS_FIGURES),
    )
    findings = Findings(
        title=_OPENNESS_TITLE,
        values=curves.values() | {"num_runs": len(scores)},
        table=curves.table(),
        conclusion=_conclude_openness(curves, len(scores)),
        picture="training.png",
        plot=partial(curves.plot, _OPENNESS_TITLE),
        metrics={"spearman": curves.figures[_OPENNESS_FIGURES["tau_entropy_spearman"]][-1][0]},
        settings={
            "analysis": _OPENNESS_TITLE,
            "runs": {run: outcome["mlflow_run_id"] for run, outcome in outcomes.items()},
        },
        source=config.runs[0],
    )
    publish_findings(config, findings, uri=uri)
    return curves


def _read_outcome(run: str) -> Mapping[str, Any]:
    outcome = read_json(join(run, "outcome.json"))
    if outcome is None:
        raise FileNotFoundError(f"runs: {run} is no directory of a finished run: it holds no outcome.json")
    if not outcome["validations"] or "tau_entropy_spearman" not in outcome["validations"][-1]["scores"]:
        raise ValueError(f"runs: {run} has no validation of temperatures of a language model")
    return outcome


def _conclude_openness(curves: Curves, num_runs: int) -> str:
    """Return one line with the first and the last rank correlation."""
    points = curves.figures[_OPENNESS_FIGURES["tau_entropy_spearman"]]
    return (
        f"Spearman(τ, entropy) is {show(points[0])} at step {curves.xs[0]:g} and {show(points[-1])} at step "
        f"{curves.xs[-1]:g}; {num_runs} runs"
    )


_TAU_MAX_FIGURES = {"wikitext/word_perplexity": "word perplexity", "wikitext/tau_mean": "mean τ"}
_TAU_MAX_TITLE = "perplexity over τ_max at inference"


def analyse_tau_max(config: TauMax) -> Curves:
    """Run or continue the analysis, and return the curves: means over the models.

    Raises:
        ValueError, OSError: before any work starts, if models, TempNets and text do not fit together.
        ScoringFailedError: naming what failed.
    """
    from jobs.scoring.language_models.config import EvaluateConfig
    from jobs.scoring.language_models.evaluate import evaluate
    from jobs.scoring.language_models.temperatures import Temperature

    uri = resolve_uri(config.tracking, config.run.resolved_storage)
    output = absolute_output(config)
    names = {value: Temperature.parse(f"tempnet:{value}").name for value in config.tau_max}
    evaluation = EvaluateConfig(
        models=config.models,
        temperatures=("one", *names.values()),
        wikitext=config.wikitext,
        batch_size=config.batch_size,
        workers=config.workers,
        storage=output,
        tracking=TrackingSection(enabled=False),
    )
    columns = evaluate(evaluation).columns
    of = {
        name: [column.metrics for column in columns if column.parameters["temperature"] == name]
        for name in evaluation.temperatures
    }
    curves = collect(
        "τ_max",
        config.tau_max,
        list(_TAU_MAX_FIGURES.values()),
        lambda value: average(of[names[value]], _TAU_MAX_FIGURES),
    )
    at_one = mean_interval([metrics["wikitext/word_perplexity"] for metrics in of["one"]])
    points = curves.figures["word perplexity"]
    best = min(range(len(points)), key=lambda number: points[number][0])
    findings = Findings(
        title=_TAU_MAX_TITLE,
        values=curves.values() | {"num_models": len(config.models), "word perplexity at τ = 1": at_one[0]},
        table=curves.table(),
        conclusion=(
            f"lowest word perplexity {show(points[best])} at τ_max = {curves.xs[best]:g}, where the mean τ is "
            f"{show(curves.figures['mean τ'][best])}; {show(at_one)} at τ = 1; {len(config.models)} models"
        ),
        picture="tau_max.png",
        plot=partial(curves.plot, _TAU_MAX_TITLE),
        metrics={"word_perplexity": points[best][0], "tau_max": curves.xs[best]},
        settings={
            "analysis": _TAU_MAX_TITLE,
            "models": list(config.models),
            "text": config.wikitext,
            "τ_max": list(config.tau_max),
        },
        source=config.wikitext,
    )
    publish_findings(config, findings, uri=uri)
    return curves
