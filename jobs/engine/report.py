"""What a finished run reports: a verdict on its temperatures, its results as text, its curves and histograms, and pages.

On held-out data, by the loss that it was trained with, the TempNet is compared with two rivals: the best constant τ and
MeanShift (`tempnet.baselines`). The report shows the learned temperatures shuffled over the tokens, too, if they are known.
"""

from __future__ import annotations

import base64
import html
import io
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from jobs.engine.metrics import TrackedRun, metric_history, survive_outage

# A TempNet is considered constant if the standard deviation of its temperatures is below this share of their mean.
CONSTANT_SPREAD = 0.01
# A temperature within this share of the range of τ from an end is held back by it.
AT_A_BOUND = 0.01

_LOSSES = {"robust": "robust loss", "cross_entropy": "cross-entropy"}
_BEST = "beats both constants"
_CONSTANTS = {"best_constant": "the best constant τ", "mean_shift": "MeanShift"}


# A run may learn temperatures of two kinds, of which one can be constant and the other not: each has a verdict of its own.
# The kinds are prefixes of the figures and scores of an outcome; a run with one kind has none.
_KINDS = {"image": ("images", "image"), "text": ("captions", "caption")}


def is_constant(scores: Mapping[str, float], kind: str = "") -> bool:
    """Return whether the standard deviation of τ is below CONSTANT_SPREAD times its mean in the scores of a validation."""
    return _spread(scores, kind) < CONSTANT_SPREAD


def _spread(scores: Mapping[str, float], kind: str) -> float:
    prefix = f"{kind}_" if kind else ""
    return scores[f"{prefix}tau_std"] / scores[f"{prefix}tau_mean"]


def beats(figures: Mapping[str, float], loss: str, constant: str) -> bool:
    """Return whether the gain over a rival exceeds the half-width of its 95 % interval; False if the width is NaN."""
    return figures[f"{loss}/{constant}_gain"] > figures[f"{loss}/{constant}_gain_half_width"]


def verdicts(outcome: Mapping[str, Any]) -> dict[str, str]:
    """Return, by kind of temperature: `is constant`, `beats both constants`, or which rivals it does not beat."""
    if (loss := outcome.get("judged_by")) is None:
        return {}
    found = {}
    for kind in [kind for kind in _KINDS if f"{kind}/{loss}/loss" in outcome["rivals"]] or [""]:
        judge = f"{kind}/{loss}" if kind else loss
        unbeaten = [name for constant, name in _CONSTANTS.items() if not beats(outcome["rivals"], judge, constant)]
        found[kind] = f"does not beat {' nor '.join(unbeaten)}" if unbeaten else _BEST
        if is_constant(outcome["validation"], kind):
            found[kind] = "is constant"
    return found


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


def verdict_metrics(outcome: Mapping[str, Any]) -> dict[str, float]:
    """Return MLflow metrics: the figures of `rivals` and, if a TempNet was trained, `beats_both_constants` (1 or 0).

    With two kinds of temperatures it is 1 if both do, and each has a figure of its own (`image/beats_both_constants`).
    """
    figures = {name: float(value) for name, value in outcome.get("rivals", {}).items()}
    if outcome.get("temperature_verdict"):
        each = {kind: float(said == _BEST) for kind, said in verdicts(outcome).items()}
        figures |= {f"{kind}/beats_both_constants": value for kind, value in each.items() if kind}
        figures["beats_both_constants"] = min(each.values(), default=0.0)
    return figures


def verdict_rows(outcome: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the lines of a report: the verdicts, the losses at the learned τ and with both rivals, and any warning.

    The line of a rival shows by how much its loss exceeds that at the learned τ, with the half-width of the 95 %
    interval. The warning is given if a TempNet is constant.
    """
    if outcome.get("temperature_verdict") is None:
        return []
    figures, judge = outcome["rivals"], outcome["judged_by"]
    data = f"{outcome.get('judged_on', 'validation')} data"
    found = verdicts(outcome)
    lines = [("verdict", verdict(outcome) or "")] if len(found) > 1 else []
    warnings: list[tuple[str, str]] = []
    for kind, said in found.items():
        name = f"learned τ of {_KINDS[kind][0]}" if kind else "learned τ"
        lines.append((name, f"{said.removeprefix('is ')} ({_LOSSES[judge]} on {data})"))
        for loss, title in _LOSSES.items():
            prefix = f"{kind}/{loss}" if kind else loss
            if f"{prefix}/loss" not in figures:
                continue
            lines.append((f"{title} at the learned τ", f"{figures[f'{prefix}/loss']:.4f}"))
            for constant, constant_title in (_CONSTANTS | {"shuffled": "τ shuffled over the tokens"}).items():
                if f"{prefix}/{constant}_loss" not in figures:
                    continue
                value, gain, half_width = (
                    figures[f"{prefix}/{constant}_{key}"] for key in ("loss", "gain", "gain_half_width")
                )
                tau = figures.get(f"{prefix}/{constant}_tau")
                at = "" if tau is None else f", {tau:.4g}"
                lines.append((f"  at {constant_title}{at}", f"{value:.4f} ({gain:+.4f} ± {half_width:.4f})"))
        warnings += [("WARNING", text) for text in _warnings(outcome, kind, is_constant=said == "is constant")]
    return lines + warnings


def _warnings(outcome: Mapping[str, Any], kind: str, *, is_constant: bool) -> Iterator[str]:
    """Yield what a reader should mistrust: temperatures that are constant, or held back by the range of τ."""
    scores, judge = outcome["validation"], outcome["judged_by"]
    low, high = outcome.get("tau_min", 0.0), outcome.get("tau_max", math.inf)
    best = outcome["rivals"][f"{kind}/{judge}/best_constant_tau" if kind else f"{judge}/best_constant_tau"]
    margin = AT_A_BOUND * (high - low) if math.isfinite(high) else 0.0
    bound = ""
    if best >= high - margin:
        bound = f"raise temperature.tau-max = {high:g}"
    elif best <= low + margin:
        bound = f"lower temperature.tau-min = {low:g}"
    if bound:
        yield f"the best constant τ, {best:.4g}, is capped by the range of τ, [{low:g}, {high:g}]: {bound}"
    elif judge == "cross_entropy" and (share := scores.get("tau_share_upper_bound", 0.0)) > AT_A_BOUND:
        bound = f"raise temperature.tau-max = {high:g}"
        yield f"{share:.1%} of the temperatures lie at the upper end of the range of τ, [{low:g}, {high:g}]: {bound}"
    if is_constant:
        advice = "raise optimizer.learning-rate-tempnet or run.num-steps"
        if outcome.get("judged_on") == "training":
            advice = "raise temperature.tau-step or run.num-steps"
        if judge == "robust":
            advice += ", or choose another ρ"
        spread = f"{_spread(scores, kind):.2%} of its mean; {bound or advice}"
        yield f"{_learner(outcome, kind)} is constant: τ spreads by {spread}"


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


def data_uri(data: bytes, kind: str) -> str:
    """Return an image (png or jpeg) as the source of an `img` in a page."""
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


@contextmanager
def picture(
    path: Path | io.BytesIO,
    num_rows: int = 1,
    num_columns: int = 1,
    *,
    figsize: tuple[float, float],
    title: str = "",
    **options: Any,
) -> Iterator[Any]:
    """Draw the axes (num_rows, num_columns) of a picture within the block, then write it to a local file or a stream.

    The title stands above all axes; `options` are those of Matplotlib's `Figure.subplots`.
    """
    from matplotlib.figure import Figure  # only where a picture is drawn, because it takes a second

    figure = Figure(figsize, layout="constrained")
    yield figure.subplots(num_rows, num_columns, squeeze=False, **options)
    if title:
        figure.suptitle(title)
    figure.savefig(path, dpi=120)


def draw_curves(path: Path, tracked: TrackedRun, curves: Mapping[str, tuple[str, ...]], title: str) -> None:
    """Plot metrics over the steps in panels, two in a row; only warns, without a plot, if MLflow is unreachable."""
    histories = None
    with survive_outage("the training curves"):
        histories = {key: metric_history(tracked, key) for keys in curves.values() for key in keys}
    if histories is None:
        return
    num_rows = math.ceil(len(curves) / 2)
    with picture(path, num_rows, 2, figsize=(11, 3.5 * num_rows), title=title) as panels:
        for panel in panels.flat[len(curves) :]:
            panel.set_axis_off()
        for panel, (heading, keys) in zip(panels.flat, curves.items(), strict=False):
            for key in keys:
                if history := histories[key]:
                    steps = sorted(history)
                    marker = "o" if key.startswith("validation") else None
                    panel.plot(steps, [history[step] for step in steps], label=key, marker=marker, markersize=4)
            panel.set(title=heading, xlabel="step")
            panel.grid(alpha=0.3)
            if panel.lines:
                panel.legend(fontsize=8)


def draw_histogram(path: Path, outcome: Mapping[str, Any], *, band: tuple[float, float] | None = None) -> None:
    """Plot the shares of τ over [τ_min, τ_max] for each histogram of the outcome."""
    with picture(path, figsize=(7, 3.5)) as ((axes,),):
        for name, counts in outcome["histograms"].items():
            edges = np.linspace(outcome["tau_min"], outcome["tau_max"], len(counts) + 1)
            axes.stairs(np.array(counts) / max(1.0, sum(counts)), edges, fill=True, alpha=0.5, label=f"{name}s")
        if band:
            axes.axvspan(*band, alpha=0.12, color="green", label=f"band of mean τ, {band[0]:g} to {band[1]:g}")
        axes.set(xlabel="τ", ylabel="share", title=f"{outcome['run']}: temperatures")
        axes.legend()


def results(rows: Iterable[tuple[str, str]], outcome: Mapping[str, Any], unit: str) -> str:
    """Format the results of a finished run: the given rows, the verdict on its TempNet, then speed, steps and epochs."""
    rows = [*rows, *verdict_rows(outcome)]
    if speed := outcome[f"{unit}_per_second"]:
        rows.append(("training speed", f"{speed:,.0f} {unit}/s"))
        rows.append(("share of the time spent waiting for data", f"{outcome['data_wait_share']:.2%}"))
    if retries := outcome.get("store_retries"):
        rows.append(("repeated requests to object stores", f"{retries}"))
    num_epochs = outcome["num_epochs"]  # None if the run ended before all of its data were prepared
    rows.append(
        ("steps, epochs", f"{outcome['num_steps']}, {'below 1' if num_epochs is None else f'{num_epochs:.2f}'}")
    )
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in rows)


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """Returns a Markdown table whose columns are also aligned in the source text.

    The first row is the heading. The first column is aligned to the left, and all others hold figures, aligned to the
    right.
    """
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        figures = [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)]
        return f"| {' | '.join([cells[0].ljust(widths[0]), *figures])} |"

    ruler = [":" + "-" * (widths[0] - 1), *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join(map(line, [rows[0], ruler, *rows[1:]]))
