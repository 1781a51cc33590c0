"""The analysis `tau-max`: the perplexity of a text at several values of τ_max at inference (TempNet, Figure 9)."""

from __future__ import annotations

from functools import partial

from jobs.engine.config import TrackingSection
from jobs.engine.tracking import resolve_uri
from jobs.scoring.analyses.config import TauMax
from jobs.scoring.analyses.curves import Curves, average, collect, show
from jobs.scoring.language_models.config import EvaluateConfig
from jobs.scoring.language_models.evaluate import evaluate
from jobs.scoring.language_models.temperatures import Temperature
from jobs.scoring.results import Findings, absolute_output, publish_findings
from tempnet.intervals import mean_interval

_FIGURES = {"wikitext/word_perplexity": "word perplexity", "wikitext/tau_mean": "mean τ"}
_TITLE = "perplexity over τ_max at inference"


def analyse_tau_max(config: TauMax) -> Curves:
    """Run or continue the analysis, and return the curves: means over the models.

    Raises:
        ValueError, OSError: before any work starts, if models, TempNets and text do not fit together.
        ScoringFailedError: naming what failed.
    """
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
        "τ_max", config.tau_max, list(_FIGURES.values()), lambda value: average(of[names[value]], _FIGURES)
    )
    at_one = mean_interval([metrics["wikitext/word_perplexity"] for metrics in of["one"]])
    points = curves.figures["word perplexity"]
    best = min(range(len(points)), key=lambda number: points[number][0])
    findings = Findings(
        title=_TITLE,
        values=curves.values() | {"num_models": len(config.models), "word perplexity at τ = 1": at_one[0]},
        table=curves.table(),
        conclusion=(
            f"lowest word perplexity {show(points[best])} at τ_max = {curves.xs[best]:g}, where the mean τ is "
            f"{show(curves.figures['mean τ'][best])}; {show(at_one)} at τ = 1; {len(config.models)} models"
        ),
        picture="tau_max.png",
        plot=partial(curves.plot, _TITLE),
        metrics={"word_perplexity": points[best][0], "tau_max": curves.xs[best]},
        settings={
            "analysis": _TITLE,
            "models": list(config.models),
            "text": config.wikitext,
            "τ_max": list(config.tau_max),
        },
        source=config.wikitext,
    )
    publish_findings(config, findings, uri=uri)
    return curves
