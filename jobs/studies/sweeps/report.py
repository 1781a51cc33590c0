"""The report of a sweep: a table, the chosen trial, and a page with the mean temperature over each axis."""

from __future__ import annotations

import html
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from jobs.engine.report import data_uri, html_page, markdown_table
from jobs.studies.sweeps.band_search import LOSS, TITLE, is_wide, loss_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    name: str
    point: Mapping[str, float]
    tau_mean: float
    """Mean temperature of the last validation; NaN if the trial failed."""
    loss: float
    is_in_band: bool
    num_steps: int
    """Number of steps that the trial ran for; 0 if it failed."""
    history: Sequence[tuple[int, float, float]]
    """(step, mean τ, loss) of every validation."""
    stopped: str
    """Reason why the trial was stopped early; empty if it was not."""
    error: str
    """Error of a failed trial; empty if it did not fail."""


def make_row(
    name: str, point: Mapping[str, float], outcome: Mapping[str, Any] | None, error: str, band: tuple[float, float]
) -> Row:
    """Returns the row of a trial with an outcome, or None if it failed with an error."""
    outcome = outcome or {}
    scores = outcome.get("validation", {})
    tau = float(scores.get("tau_mean", math.nan))
    stopped = str(outcome.get("stopped", ""))
    return Row(
        name=name,
        point=point,
        tau_mean=tau,
        loss=loss_of(scores),
        is_in_band=band[0] <= tau <= band[1] and not stopped,
        num_steps=int(outcome.get("num_steps", 0)) - int(outcome.get("started_at_step", 0)),
        history=[
            (validation["step"], validation["scores"].get("tau_mean", math.nan), loss_of(validation["scores"]))
            for validation in outcome.get("validations", [])
        ],
        stopped=stopped,
        error=error,
    )


def choose(rows: Sequence[Row], band: tuple[float, float]) -> tuple[Row | None, str]:
    """Returns the best trial in the band or, if none lies in it, the nearest to it; and the reason for the choice."""
    inside = [row for row in rows if row.is_in_band and math.isfinite(row.loss)]
    if inside:
        best = min(inside, key=lambda row: row.loss)
        return best, f"of the {len(inside)} trials in the band it has the best {TITLE}"
    # The final temperature of a stopped trial is unknown, so stopped trials are used only if there are no others.
    with_tau = [row for row in rows if math.isfinite(row.tau_mean) and not row.stopped] or [
        row for row in rows if math.isfinite(row.tau_mean)
    ]
    if not with_tau:
        return None, "no trial ended with a temperature"
    nearest = min(with_tau, key=lambda row: max(band[0] - row.tau_mean, row.tau_mean - band[1]))
    return nearest, "no trial lies in the band; this is the nearest"


def best_values(axes: Iterable[str], best: Row | None) -> dict[str, float]:
    """Returns the metrics by which MLflow shows the chosen trial at its sweep: loss, mean τ, and the value of every axis."""
    named = {f"best_{name.rpartition('.')[2]}": best.point[name] if best else math.nan for name in axes}
    loss, tau = (best.loss, best.tau_mean) if best else (math.nan, math.nan)
    return {f"best_{LOSS}": loss, "best_tau_mean": tau, **named}


def _cells(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Returns the cells that both tables have: name, values of the axes, mean τ, loss, steps."""
    titles = ("trial", *rows[0].point, "mean τ", TITLE, "steps")
    return [
        titles,
        *(
            (row.name, *(f"{value:g}" for value in row.point.values()), _format(row.tau_mean), _format(row.loss),
             str(row.num_steps))
            for row in rows
        ),
    ]  # fmt: skip


def as_markdown(rows: Sequence[Row], band: tuple[float, float], num_grid_steps: int) -> str:
    """Returns the table, the chosen trial, and the steps taken beside those of the whole grid (0: none), in Markdown."""
    best, why = choose(rows, band)
    (*titles, loss, steps), *lines = _cells(rows)
    cells = [[*titles, "in the band", loss, steps]]
    for row, (name, *values, tau, loss, steps) in zip(rows, lines, strict=True):
        where = "stopped" if row.stopped else "yes" if row.is_in_band else "no"
        figures = ["FAILED", "", "", ""] if row.error else [tau, where, loss, steps]
        cells.append([f"{'→ ' if row is best else ''}{name}", *values, *figures])
    line = f"Chosen: {best.name}: {why}." if best else f"Chosen: none: {why}."
    num_steps = sum(row.num_steps for row in rows)
    share = f", {num_steps / num_grid_steps:.0%} of the {num_grid_steps:,} of the whole grid" if num_grid_steps else ""
    return (
        f"{markdown_table(cells)}\n\nBand of the mean τ: {band[0]:g} to {band[1]:g}. {line}\n\n"
        f"Steps: {num_steps:,}{share}."
    )


def as_page(title: str, rows: Sequence[Row], band: tuple[float, float]) -> str:
    """Returns a self-contained HTML page with embedded figures, followed by the table."""
    best, why = choose(rows, band)
    titles, *lines = _cells(rows)
    header = "".join(f"<th>{html.escape(name)}</th>" for name in (*titles, "what happened"))
    body = "".join(
        f"<tr class='{'best' if row is best else ''}'>"
        + "".join(f"<td>{html.escape(cell)}</td>" for cell in (*line, _describe_end(row)))
        + "</tr>"
        for row, line in zip(rows, lines, strict=True)
    )
    return html_page(
        title,
        f"<p>Chosen: <b>{html.escape(best.name if best else 'none')}</b>: {html.escape(why)}.</p>"
        f"<h2>Over the axes</h2>{_embed(draw_axes(rows, band), 'mean τ and loss over the axes')}"
        f"<h2>Over the steps</h2>{_embed(draw_steps(rows, band), 'mean τ and loss over the steps')}"
        f"<h2>All trials</h2>{_embed(draw_parallel(rows, best), 'parallel coordinates')}"
        f"<div class='wide'><table><tr>{header}</tr>{body}</table></div>",
    )


def draw_axes(rows: Sequence[Row], band: tuple[float, float]) -> Figure:
    """Draws mean τ, with the band, and the loss over every axis; lines join trials that differ only in that axis."""
    axes = list(rows[0].point)
    figure = Figure((5.5 * len(axes), 7), layout="constrained")
    for axis, (above, below) in zip(axes, figure.subplots(2, len(axes), squeeze=False).T, strict=True):
        groups = _group(rows, axis)
        for line, group in groups.items():
            group = [row for row in group if math.isfinite(row.tau_mean)]
            cut = [row for row in group if row.stopped]
            (drawn,) = above.plot([row.point[axis] for row in group], [row.tau_mean for row in group], "o-", label=line)
            below.plot([row.point[axis] for row in group], [row.loss for row in group], "o-", color=drawn.get_color())
            above.plot([row.point[axis] for row in cut], [row.tau_mean for row in cut], "kx", ms=9)
            below.plot([row.point[axis] for row in cut], [row.loss for row in cut], "kx", ms=9)
        above.axhspan(*band, alpha=0.15, color="green", label="band")
        above.set(xlabel=axis, ylabel="mean τ (×: ended early)")
        below.set(xlabel=axis, ylabel=TITLE)
        for panel in (above, below):
            panel.set_xscale("log" if is_wide([row.point[axis] for row in rows]) else "linear")
            panel.grid(alpha=0.3)
        if len(groups) <= 8:
            above.legend(fontsize=8)
    return figure


def draw_steps(rows: Sequence[Row], band: tuple[float, float]) -> Figure:
    """Draws mean τ, with the band, and the loss of every trial over its validations."""
    figure = Figure((11, 7), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    for row in rows:
        steps = [step for step, _, _ in row.history]
        above.plot(steps, [tau for _, tau, _ in row.history], ".-", label=row.name)
        below.plot(steps, [score for _, _, score in row.history], ".-")
    above.axhspan(*band, alpha=0.15, color="green")
    above.set(ylabel="mean τ")
    below.set(xlabel="step", ylabel=TITLE)
    for panel in (above, below):
        panel.grid(alpha=0.3)
    if len(rows) <= 16:
        above.legend(fontsize=7, ncols=2)
    return figure


def draw_parallel(rows: Sequence[Row], best: Row | None) -> Figure:
    """Draws a line per trial through its axes, mean τ and loss, each with its own scale; green: in the band."""
    columns = [*rows[0].point, "mean τ", TITLE]
    shown = [row for row in rows if math.isfinite(row.tau_mean) and math.isfinite(row.loss)]
    figure = Figure((11, 4), layout="constrained")
    panel = figure.subplots()
    heights = []
    for number, values in enumerate(
        zip(*((*row.point.values(), row.tau_mean, row.loss) for row in shown), strict=True)
    ):
        scaled = np.log(values) if is_wide(values) else np.array(values)
        width = np.ptp(scaled)
        heights.append((scaled - scaled.min()) / width if width else np.full(len(scaled), 0.5))
        panel.text(number, -0.06, f"{min(values):.4g}", ha="center", va="top", fontsize=8)
        panel.text(number, 1.06, f"{max(values):.4g}", ha="center", va="bottom", fontsize=8)
    for row, line in zip(shown, np.transpose(heights), strict=True):
        colour = "tab:green" if row.is_in_band else "tab:gray"
        panel.plot(line, "o-", color=colour, lw=3 if row is best else 1, alpha=1 if row is best else 0.6)
    panel.set(xticks=range(len(columns)), xticklabels=columns, yticks=[], ylim=(-0.2, 1.2))
    panel.tick_params(axis="x", pad=8)
    panel.grid(axis="x")
    return figure


def _embed(figure: Figure, description: str) -> str:
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=110)
    return f"<img alt='{html.escape(description)}' src='{data_uri(content.getvalue(), 'png')}'>"


def _group(rows: Sequence[Row], axis: str) -> dict[str, list[Row]]:
    """Groups trials that differ only in one axis, sorted by it; the keys describe the values that they share."""
    groups: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row.point[axis]):
        rest = ", ".join(f"{name.rpartition('.')[2]} {value:g}" for name, value in row.point.items() if name != axis)
        groups.setdefault(rest, []).append(row)
    return groups


def _describe_end(row: Row) -> str:
    if row.error:
        return f"failed: {row.error}"
    if row.stopped:
        return f"stopped after {row.num_steps} steps: {row.stopped}"
    return "in the band" if row.is_in_band else "outside the band"


def _format(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.4f}"
