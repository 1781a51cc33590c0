"""Judges whether a run's learned temperature is useful: one verdict for the report, the outcome and MLflow.

On held-out data, by the loss that it was trained with, the TempNet is compared with two rivals: the best constant τ and
MeanShift (`tempnet.rivals`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# A TempNet is considered constant if the standard deviation of its temperatures is below this share of their mean.
CONSTANT_SPREAD = 0.01

_LOSSES = {"robust": "robust loss", "cross_entropy": "cross-entropy"}
_BEST = "beats both constants"
_CONSTANTS = {"best_constant": "the best constant τ", "mean_shift": "MeanShift"}


# A run may learn temperatures of two kinds, of which one can be constant and the other not: each has a verdict of its own.
# The kinds are prefixes of the figures and scores of an outcome; a run with one kind has none.
_KINDS = {"image": ("images", "image"), "text": ("captions", "caption")}


def is_constant(scores: Mapping[str, float], kind: str = "") -> bool:
    """Return whether the standard deviation of τ is below CONSTANT_SPREAD times its mean in the scores of a validation.

    Args:
        scores: the scores, with `tau_mean` and `tau_std`, or `image_tau_mean` and so on.
        kind: `image` or `text`; empty if the run learns temperatures of one kind.
    """
    return _spread(scores, kind) < CONSTANT_SPREAD


def _spread(scores: Mapping[str, float], kind: str) -> float:
    prefix = f"{kind}_" if kind else ""
    return scores[f"{prefix}tau_std"] / scores[f"{prefix}tau_mean"]


def beats(figures: Mapping[str, float], loss: str, constant: str) -> bool:
    """Return whether the gain over a rival exceeds the half-width of its 95 % interval; False if the width is NaN."""
    return figures[f"{loss}/{constant}_gain"] > figures[f"{loss}/{constant}_gain_half_width"]


def verdicts(outcome: Mapping[str, Any]) -> dict[str, str]:
    """Return, by kind of temperature: `is constant`, `beats both constants`, or which rivals it does not beat.

    Args:
        outcome: outcome of a run; read are `judged_by` (`robust` or `cross_entropy`, the training loss; none: no temperature
            is learned for each input), `rivals` and `validation`.
    """
    if (loss := outcome.get("judged_by")) is None:
        return {}
    found = {}
    for kind in _kinds(outcome):
        judge = f"{kind}/{loss}" if kind else loss
        unbeaten = [name for constant, name in _CONSTANTS.items() if not beats(outcome["rivals"], judge, constant)]
        found[kind] = f"does not beat {' nor '.join(unbeaten)}" if unbeaten else _BEST
        if is_constant(outcome["validation"], kind):
            found[kind] = "is constant"
    return found


def _kinds(outcome: Mapping[str, Any]) -> list[str]:
    return [kind for kind in _KINDS if f"{kind}/{outcome['judged_by']}/loss" in outcome["rivals"]] or [""]


def verdict(outcome: Mapping[str, Any]) -> str | None:
    """Return the verdicts in one line, such as `the image TempNet is constant; the caption TempNet beats both constants`.

    A run with one kind of temperature has its verdict alone (`constant`, without the verb). None: nothing is judged.
    """
    found = verdicts(outcome)
    if list(found) == [""]:
        return found[""].removeprefix("is ")
    return "; ".join(f"{_learner(outcome, kind)} {said}" for kind, said in found.items()) or None


def _learner(outcome: Mapping[str, Any], kind: str) -> str:
    """Name what has learned temperatures: a network, or the training itself, which keeps one for every sample."""
    if outcome.get("judged_on") == "training":
        return f"the stored τ of {_KINDS[kind][0]}"
    return f"the {_KINDS[kind][1]} TempNet" if kind else "the TempNet"


def tags(outcome: Mapping[str, Any]) -> dict[str, str]:
    """Return the MLflow tag `temperature.verdict`; empty for a run that trains no TempNet."""
    judgement = outcome.get("temperature_verdict")
    return {"temperature.verdict": judgement} if judgement else {}


def metrics(outcome: Mapping[str, Any]) -> dict[str, float]:
    """Return MLflow metrics: the figures of `rivals` and, if a TempNet was trained, `beats_both_constants` (1 or 0).

    With two kinds of temperatures it is 1 if both do, and each has a figure of its own (`image/beats_both_constants`).
    """
    figures = {name: float(value) for name, value in outcome.get("rivals", {}).items()}
    if outcome.get("temperature_verdict"):
        each = {kind: float(said == _BEST) for kind, said in verdicts(outcome).items()}
        figures |= {f"{kind}/beats_both_constants": value for kind, value in each.items() if kind}
        figures["beats_both_constants"] = min(each.values(), default=0.0)
    return figures


def rows(outcome: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the lines of a report: the verdicts, the losses at the learned τ and with both rivals, and any warning.

    The line of a rival shows by how much its loss exceeds that at the learned τ, with the half-width of the 95 %
    interval. The warning is given if a TempNet is constant.
    """
    if outcome.get("temperature_verdict") is None:
        return []
    figures, scores, judge = outcome["rivals"], outcome["validation"], outcome["judged_by"]
    data = f"{outcome.get('judged_on', 'validation')} data"
    found = verdicts(outcome)
    lines = [("verdict", verdict(outcome) or "")] if len(found) > 1 else []
    warnings = []
    for kind, said in found.items():
        name = f"learned τ of {_KINDS[kind][0]}" if kind else "learned τ"
        lines.append((name, f"{said.removeprefix('is ')} ({_LOSSES[judge]} on {data})"))
        for loss, title in _LOSSES.items():
            prefix = f"{kind}/{loss}" if kind else loss
            if f"{prefix}/loss" not in figures:
                continue
            lines.append((f"{title} at the learned τ", f"{figures[f'{prefix}/loss']:.4f}"))
            for constant, constant_title in _CONSTANTS.items():
                tau, value, gain, half_width = (
                    figures[f"{prefix}/{constant}_{key}"] for key in ("tau", "loss", "gain", "gain_half_width")
                )
                lines.append((f"  at {constant_title}, {tau:.4g}", f"{value:.4f} ({gain:+.4f} ± {half_width:.4f})"))
        if said == "is constant":
            advice = "raise optimizer.learning_rate_tempnet or run.num_steps, or choose another ρ"
            if outcome.get("judged_on") == "training":
                advice = "raise temperature.tau_step or run.num_steps, or choose another ρ"
            text = (
                f"{_learner(outcome, kind)} is constant: τ spreads by {_spread(scores, kind):.2%} of its mean; {advice}"
            )
            warnings.append(("WARNING", text))
    return lines + warnings
