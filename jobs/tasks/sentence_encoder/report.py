"""The report of a finished run of a sentence encoder: a table of results, histograms of τ and training curves."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jobs.engine.curves import draw_curves, draw_histogram
from jobs.engine.description import results
from jobs.engine.tracking import TrackedRun

_CURVES = {
    "loss (training objective)": ("train/loss", "train/mlm_loss", "validation/mlm_loss"),
    "an anchor finds its positive": ("validation/span_recall@1", "validation/mlm_accuracy"),
    "τ": ("train/tau_q05", "train/tau_mean", "train/tau_q95"),
    "cosine of anchor and positive": ("validation/positive_cosine",),
}


def summary_table(outcome: Mapping[str, Any]) -> str:
    """Return the results of a run as text for the terminal."""
    scores = outcome["validation"]
    rows = [("loss", outcome["loss"])]
    if "span_recall@1" in scores:
        rows.append(("an anchor finds its positive", f"{scores['span_recall@1']:.2%}"))
    if "mlm_loss" in scores:
        rows.append(("MLM loss, accuracy", f"{scores['mlm_loss']:.4f}, {scores['mlm_accuracy']:.2%}"))
    if "tau_mean" in scores:
        spread = f" ± {scores['tau_std']:.4f}" if "tau_std" in scores else ""
        rows.append(("mean τ", f"{scores['tau_mean']:.4f}{spread}"))
    return results(rows, outcome, "documents")


def write_report(directory: Path, outcome: Mapping[str, Any], tracked: TrackedRun | None) -> None:
    """Write `histogram.png`, if a TempNet predicts temperatures, and `curves.png`, if the run is logged to MLflow."""
    if outcome["histograms"]:
        draw_histogram(directory / "histogram.png", outcome)
    if tracked:
        draw_curves(directory / "curves.png", tracked, _CURVES, f"{outcome['run']}: {outcome['loss']}")
