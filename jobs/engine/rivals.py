"""Whether a run's learned temperature is worth anything: one verdict for the report, the outcome and MLflow.

A TempNet is judged on held-out data by the loss that it was trained on, beside the best constant τ and MeanShift
(`tempnet.rivals`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# A TempNet whose temperatures have a standard deviation below this share of their mean tells nothing apart.
CONSTANT_SPREAD = 0.01

_LOSSES = {"robust": "robust loss", "cross_entropy": "cross-entropy"}
_CONSTANTS = {"best_constant": "the best constant τ", "mean_shift": "MeanShift"}


def is_constant(scores: Mapping[str, float]) -> bool:
    """Whether the standard deviation of τ is below CONSTANT_SPREAD of its mean; `scores` are those of a validation."""
    return scores["tau_std"] < CONSTANT_SPREAD * scores["tau_mean"]


def beats(figures: Mapping[str, float], loss: str, constant: str) -> bool:
    """Whether the gain over a constant is above the half-width of its 95 % interval; False where that is not known."""
    return figures[f"{loss}/{constant}_gain"] > figures[f"{loss}/{constant}_gain_half_width"]


def verdict(outcome: Mapping[str, Any]) -> str | None:
    """`constant`, `beats both constants`, or which of the two it does not beat; None for a run that trains no TempNet.

    Args:
        outcome: `judged_by` (`robust` or `cross_entropy`: the loss of the training), `rivals` and `validation`.
    """
    loss = outcome.get("judged_by")
    if loss is None:
        return None
    if is_constant(outcome["validation"]):
        return "constant"
    unbeaten = [name for constant, name in _CONSTANTS.items() if not beats(outcome["rivals"], loss, constant)]
    return f"does not beat {' nor '.join(unbeaten)}" if unbeaten else "beats both constants"


def tags(outcome: Mapping[str, Any]) -> dict[str, str]:
    """`temperature.verdict`, for MLflow; nothing for a run that trains no TempNet."""
    found = outcome.get("temperature_verdict")
    return {"temperature.verdict": found} if found else {}


def metrics(outcome: Mapping[str, Any]) -> dict[str, float]:
    """The figures of `rivals` and, for a run that trains a TempNet, `beats_both_constants` (1 or 0), for MLflow."""
    figures = {f"rivals/{name}": float(value) for name, value in outcome.get("rivals", {}).items()}
    if found := outcome.get("temperature_verdict"):
        figures["beats_both_constants"] = float(found == "beats both constants")
    return figures


def rows(outcome: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The lines of a report: the verdict, the losses at τ and at both constants, and a warning of a constant TempNet.

    A constant's line says by how much its loss is above that at τ, with the half-width of the 95 % interval.
    """
    if (found := outcome.get("temperature_verdict")) is None:
        return []
    figures, scores, judge = outcome["rivals"], outcome["validation"], outcome["judged_by"]
    lines = [("learned τ", f"{found} ({_LOSSES[judge]} on validation data)")]
    for loss, name in _LOSSES.items():
        if f"{loss}/loss" not in figures:
            continue
        lines.append((f"{name} at the learned τ", f"{figures[f'{loss}/loss']:.4f}"))
        for constant, title in _CONSTANTS.items():
            tau, value, gain, half_width = (
                figures[f"{loss}/{constant}_{key}"] for key in ("tau", "loss", "gain", "gain_half_width")
            )
            lines.append((f"  at {title}, {tau:.4g}", f"{value:.4f} ({gain:+.4f} ± {half_width:.4f})"))
    if found == "constant":
        spread = scores["tau_std"] / scores["tau_mean"]
        advice = "raise optimizer.learning_rate_tempnet or run.num_steps, or choose another ρ"
        lines.append(("WARNING", f"the TempNet is constant: τ spreads by {spread:.2%} of its mean; {advice}"))
    return lines
