"""Figures over a quantity that was varied: a table, a picture and one line for each of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobs.engine.tables import markdown_table
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
