"""The analysis `openness`: how τ comes to follow the entropy of a context along the training of a language model."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from jobs.engine.tracking import resolve_uri
from jobs.scoring.analyses.config import Openness
from jobs.scoring.analyses.curves import Curves, average, collect, show
from jobs.scoring.results import Findings, publish_findings
from pipelines.storage import join, read_json

_FIGURES = {
    "tau_entropy_spearman": "Spearman(τ, entropy at τ = 1)",
    "tau_mean": "mean τ",
    "cross_entropy": "cross-entropy at τ = 1",
}
_TITLE = "τ and the openness of a context along the training"


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
        "step", steps, list(_FIGURES.values()), lambda step: average([scores[run][step] for run in scores], _FIGURES)
    )
    findings = Findings(
        title=_TITLE,
        values=curves.values() | {"num_runs": len(scores)},
        table=curves.table(),
        conclusion=_conclude(curves, len(scores)),
        picture="training.png",
        plot=partial(curves.plot, _TITLE),
        metrics={"spearman": curves.figures[_FIGURES["tau_entropy_spearman"]][-1][0]},
        settings={"analysis": _TITLE, "runs": {run: outcome["mlflow_run_id"] for run, outcome in outcomes.items()}},
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


def _conclude(curves: Curves, num_runs: int) -> str:
    """Return one line with the first and the last rank correlation."""
    points = curves.figures[_FIGURES["tau_entropy_spearman"]]
    return (
        f"Spearman(τ, entropy) is {show(points[0])} at step {curves.xs[0]:g} and {show(points[-1])} at step "
        f"{curves.xs[-1]:g}; {num_runs} runs"
    )
