"""The training curves of a finished run, drawn from what MLflow has of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import matplotlib

from jobs.training.tracking import TrackedRun, metric_history, survive_outage

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def draw_curves(path: Path, tracked: TrackedRun, curves: Mapping[str, tuple[str, ...]], title: str) -> None:
    """Four panels over steps; an unreachable tracking server costs the picture, not the run.

    Args:
        curves: title of a panel → metrics that it shows; what the run has not logged is left out.
    """
    with survive_outage("the training curves"):
        figure, all_axes = plt.subplots(2, 2, figsize=(11, 7), layout="constrained")
        for axes, (heading, keys) in zip(all_axes.flat, curves.items(), strict=True):
            for key in keys:
                if history := metric_history(tracked, key):
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
