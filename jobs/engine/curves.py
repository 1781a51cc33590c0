"""Plots of a finished run: its training curves, from the metrics in MLflow, and a histogram of τ; the frame of all pages."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jobs.engine.metrics import TrackedRun, metric_history, survive_outage

_STYLE = """
body { font: 16px/1.6 Georgia, serif; max-width: 64rem; margin: 2rem auto; padding: 0 1rem; color: #111; background: #fff; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; } h3 { font-size: 1rem; } body { overflow-wrap: anywhere; }
img { max-width: 100%; height: auto; } pre, .wide { overflow-x: auto; } pre { font-size: 13px; line-height: 1.4; }
.text { white-space: pre-wrap; line-height: 1.8; } .text span { border-radius: 2px; padding: 1px 0; }
.text span:focus { outline: 2px solid #000; }
.text span:focus::after { content: attr(title); position: fixed; inset: auto 0 0; padding: .6rem; font: 14px/1.4 monospace;
  background: #fff; border-top: 1px solid #333; }
.scale span { font: 12px monospace; display: inline-block; }
.row { display: flex; flex-wrap: wrap; gap: 12px; } figure { margin: 0; width: 144px; }
figure img { width: 144px; height: 144px; } figcaption { font-size: 13px; line-height: 1.3; }
td, th { padding: .2em .8em; text-align: right; overflow-wrap: normal; } .best { background: #dfd; }
td:first-child, th:first-child, td:last-child, th:last-child { text-align: left; }
"""


def html_page(title: str, body: str) -> str:
    """Return a self-contained HTML page, which fits a phone; a token in `.text` shows its title when it is tapped."""
    title = html.escape(title)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>\n'
        f'<meta name="viewport" content="width=device-width">\n<style>{_STYLE}</style></head><body>\n'
        f"<h1>{title}</h1>\n{body}\n</body></html>\n"
    )


def draw_curves(path: Path, tracked: TrackedRun, curves: Mapping[str, tuple[str, ...]], title: str) -> None:
    """Plot metrics over the steps in panels, two in a row; only warns, without a plot, if MLflow is unreachable."""
    histories = None
    with survive_outage("the training curves"):
        histories = {key: metric_history(tracked, key) for keys in curves.values() for key in keys}
    if histories is None:
        return
    plt = pyplot()
    num_rows = math.ceil(len(curves) / 2)
    figure = plt.figure(figsize=(11, 3.5 * num_rows), layout="constrained")
    for number, (heading, keys) in enumerate(curves.items(), start=1):
        axes = figure.add_subplot(num_rows, 2, number)
        for key in keys:
            if history := histories[key]:
                steps = sorted(history)
                marker = "o" if key.startswith("validation") else None
                axes.plot(steps, [history[step] for step in steps], label=key, marker=marker, markersize=4)
        axes.set(title=heading, xlabel="step")
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(fontsize=8)
    figure.suptitle(title)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_histogram(path: Path, outcome: Mapping[str, Any], *, band: tuple[float, float] | None = None) -> None:
    """Plot the shares of τ over [τ_min, τ_max] for each histogram of the outcome."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(7, 3.5), layout="constrained")
    for name, counts in outcome["histograms"].items():
        edges = np.linspace(outcome["tau_min"], outcome["tau_max"], len(counts) + 1)
        axes.stairs(np.array(counts) / max(1.0, sum(counts)), edges, fill=True, alpha=0.5, label=f"{name}s")
    if band:
        axes.axvspan(*band, alpha=0.12, color="green", label=f"band of mean τ, {band[0]:g} to {band[1]:g}")
    axes.set(xlabel="τ", ylabel="share", title=f"{outcome['run']}: temperatures")
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def pyplot() -> Any:
    """Return pyplot, which is imported only at the end of a run, because that takes a second."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt
