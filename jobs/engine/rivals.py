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
_CONSTANTS = {"best_constant": "the best constant τ", "mean_shift": "MeanShift"}


def is_constant(scores: Mapping[str, float]) -> bool:
    """Return whether the standard deviation of τ is below CONSTANT_SPREAD times its mean in the scores of a validation."""
    return scores["tau_std"] < CONSTANT_SPREAD * scores["tau_mean"]


def beats(figures: Mapping[str, float], loss: str, constant: str) -> bool:
    """Return whether the gain over a rival exceeds the half-width of its 95 % interval; False if the width is NaN."""
    return figures[f"{loss}/{constant}_gain"] > figures[f"{loss}/{constant}_gain_half_width"]


def verdict(outcome: Mapping[str, Any]) -> str | None:
    """Return `constant`, `beats both constants`, or which rivals the TempNet does not beat; None without a TempNet.

    Args:
        outcome: outcome of a run; read are `judged_by` (`robust` or `cross_entropy`, the training loss), `rivals` and
            `validation`.
    """
    loss = outcome.get("judged_by")
    if loss is None:
        return None
    if is_constant(outcome["validation"]):
        return "constant"
    unbeaten = [name for constant, name in _CONSTANTS.items() if not beats(outcome["rivals"], loss, constant)]
    return f"does not beat {' nor '.join(unbeaten)}" if unbeaten else "beats both constants"


def tags(outcome: Mapping[str, Any]) -> dict[str, str]:
    """Return the MLflow tag `temperature.verdict`; empty for a run that trains no TempNet."""
    judgement = outcome.get("temperature_verdict")
    return {"temperature.verdict": judgement} if judgement else {}


def metrics(outcome: Mapping[str, Any]) -> dict[str, float]:
    """Return MLflow metrics: the figures of `rivals` and, if a TempNet was trained, `beats_both_constants` (1 or 0)."""
    figures = {name: float(value) for name, value in outcome.get("rivals", {}).items()}
    if judgement := outcome.get("temperature_verdict"):
        figures["beats_both_constants"] = float(judgement == "beats both constants")
    return figures


def rows(outcome: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the lines of a report: the verdict, the losses at the learned τ and with both rivals, and any warning.

    The line of a rival shows by how much its loss exceeds that at the learned τ, with the half-width of the 95 %
    interval. The warning is given if the TempNet is constant.
    """
    if (judgement := outcome.get("temperature_verdict")) is None:
        return []
    figures, scores, judge = outcome["rivals"], outcome["validation"], outcome["judged_by"]
    lines = [("learned τ", f"{judgement} ({_LOSSES[judge]} on validation data)")]
    for loss, name in _LOSSES.items():
        if f"{loss}/loss" not in figures:
            continue
        lines.append((f"{name} at the learned τ", f"{figures[f'{loss}/loss']:.4f}"))
        for constant, title in _CONSTANTS.items():
            tau, value, gain, half_width = (
                figures[f"{loss}/{constant}_{key}"] for key in ("tau", "loss", "gain", "gain_half_width")
            )
            lines.append((f"  at {title}, {tau:.4g}", f"{value:.4f} ({gain:+.4f} ± {half_width:.4f})"))
    if judgement == "constant":
        spread = scores["tau_std"] / scores["tau_mean"]
        advice = "raise optimizer.learning_rate_tempnet or run.num_steps, or choose another ρ"
        lines.append(("WARNING", f"the TempNet is constant: τ spreads by {spread:.2%} of its mean; {advice}"))
    return lines
