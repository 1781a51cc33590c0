"""The report of a finished run of a dual encoder: a table of results, histograms of τ and training curves."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jobs.engine.curves import draw_curves, draw_histogram
from jobs.engine.description import results
from jobs.engine.tracking import TrackedRun

# Band of the mean τ by which the paper selects a run: the one whose mean τ lies in it (TempNet §6.2).
BAND = (0.01, 0.02)

_CURVES = {
    "loss (training objective)": ("train/loss",),
    "cross-entropy (all pairs)": ("validation/cross_entropy_tau",),
    "recall": ("validation/mean_recall", "validation/text_recall@1", "validation/image_recall@1"),
    "τ": ("train/tau_q05", "train/tau_mean", "train/tau_q95"),
    "log u": ("train/log_u_mean",),
}


def summary_table(outcome: Mapping[str, Any]) -> str:
    """Return the results of a run as text for the terminal."""
    scores = outcome["validation"]
    rows = [
        ("loss", outcome["loss"] + (f", ρ = {outcome['rho']:g}" if outcome["rho"] is not None else "")),
        ("cross-entropy at τ, all held-out pairs", f"{scores['cross_entropy_tau']:.4f}"),
        ("mean recall, last", f"{scores['mean_recall']:.2%}"),
    ]
    if outcome["best_rating"] is not None:
        rows.append(("mean recall, best (exported)", f"{outcome['best_rating']:.2%}"))
    for direction, name in (("image → text", "text"), ("text → image", "image")):
        figures = " / ".join(f"{scores[f'{name}_recall@{k}']:.2%}" for k in (1, 5, 10))
        rows.append((f"R@1 / 5 / 10, {direction}", figures))
    if "tau_mean" in scores:
        low, high = BAND
        where = "in" if low <= scores["tau_mean"] <= high else "outside"
        spread = f" ± {scores['tau_std']:.4f}" if "tau_std" in scores else ""
        rows.append(("mean τ", f"{scores['tau_mean']:.4f}{spread} ({where} the papers' band {low:g} to {high:g})"))
        for name, noun in (("image", "images"), ("text", "captions")):
            if f"{name}_tau_mean" in scores:
                rows.append((f"  of {noun}", f"{scores[f'{name}_tau_mean']:.4f} ± {scores[f'{name}_tau_std']:.4f}"))
    if share_cut := outcome.get("share_cut"):  # missing in the outcomes of older runs
        name = f"captions cut to {outcome['num_text_tokens']} tokens"
        rows.append((name, ", ".join(f"{share:.2%} ({split})" for split, share in share_cut.items())))
    return results(rows, outcome, "pairs")


def write_report(directory: Path, outcome: Mapping[str, Any], tracked: TrackedRun | None) -> None:
    """Write `histogram.png`, if temperatures differ between samples, and `curves.png`, if the run is logged to MLflow."""
    if outcome["histograms"]:
        draw_histogram(directory / "histogram.png", outcome, band=BAND)
    if tracked:
        draw_curves(directory / "curves.png", tracked, _CURVES, f"{outcome['run']}: {outcome['loss']}")
