"""The results of the bench: figures as plain values, one table, one line of conclusion, and a frontier plot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jobs.engine.description import markdown_table
from jobs.scoring.decoders.bench import CONSTANT, Comparison, PromptFigures

PLAIN = ("log_probability", "distinct", "self_bleu")
CHECKED = ("correct", "distinct_correct", "pass_at_k", "maj_at_k")
_MARKS = {"MeanShift": "s", "shuffled": "x"}


def figures(comparison: Comparison, *, k: int) -> dict[str, Any]:
    """Return all figures; losses and gains in nats per token, shares as numbers from 0 to 1.

    Every figure is a pair of mean and half-width of its 95 % interval. NaN and infinity are None, which JSON knows.
    """
    sums = comparison.sums
    decoders: dict[str, Any] = {}
    for name, rule in comparison.for_text.items():
        text = {
            "rule": rule.label,
            "loss": sums.loss(name).as_json(),
            "gain": sums.gain(name, CONSTANT).as_json(),
            "brier": sums.mean(name, "brier").as_json(),
            "ece": sums.calibration_error(name).as_json(),
            "excluded": sums.mean(name, "excluded").as_json(),
        }
        if f"{name}: MeanShift" in sums.sums:
            text["gain_over_mean_shift"] = sums.gain(name, f"{name}: MeanShift").as_json()
        decoders[name] = {"text": text}
    for name, found in comparison.prompts.items():
        decoders[name]["prompts"] = {"rule": comparison.for_prompts[name].label, **_prompt_values(found)}
    return {
        "num_tokens": comparison.num_tokens,
        "human_loss": comparison.human_loss,
        "has_verifier": comparison.has_verifier,
        "k": k,
        "decoders": decoders,
        "tried": [{"decoder": name, "rule": label, **_prompt_values(found)} for name, label, found in comparison.tried],
    }


def _prompt_values(found: PromptFigures) -> dict[str, Any]:
    values = asdict(found)
    for name in (*PLAIN, *CHECKED):
        values[name] = None if getattr(found, name) is None else getattr(found, name).as_json()
    return values


def table(values: dict[str, Any]) -> str:
    """Return the one Markdown table: a row for each decoder, first what it does on text, then on prompts."""
    k = values["k"]
    heading = ["decoder", "on text", "NLL", "gain, mnat", "Brier", "ECE, %", "left out, %"]
    heading += ["on prompts", "log p", "distinct-2", "self-BLEU"]
    if values["has_verifier"]:
        heading += ["correct, %", "distinct correct, %", f"pass@{k}, %", f"maj@{k}, %"]
    rows = [heading]
    for name, found in values["decoders"].items():
        text, prompts = found["text"], found["prompts"]
        row = [
            name,
            text["rule"],
            _show(text["loss"], 1, 3, missing="∞"),
            _show(text["gain"], 1000, 1),
            _show(text["brier"], 1, 4),
            _show(text["ece"], 100, 2),
            _show(text["excluded"], 100, 1),
            prompts["rule"],
            *(_show(prompts[measure], 1, 3) for measure in PLAIN),
        ]
        if values["has_verifier"]:
            row += [_show(prompts[measure], 100, 1) for measure in CHECKED]
        rows.append(row)
    return markdown_table(rows)


def conclusion(values: dict[str, Any]) -> str:
    """Return lines that say which decoders gain on text, over the best constant and over their own MeanShift."""
    decoders = values["decoders"]
    better = [name for name, found in decoders.items() if _is_above(found["text"]["gain"])]
    learned = {
        name: found["text"]["gain_over_mean_shift"]
        for name, found in decoders.items()
        if "gain_over_mean_shift" in found["text"]
    }
    own = [name for name, gain in learned.items() if _is_above(gain)]
    return (
        f"On text, better than the best constant τ with the whole interval: {', '.join(better) or 'none'}.\n"
        f"Of the learned decoders, better than their own MeanShift: {', '.join(own) or 'none'}.\n"
        f"{values['num_tokens']:,} tokens report; gains are of the smoothed NLL in thousandths of a nat per token, ± 95 % "
        "over documents or prompts. Parameters were chosen on the other half."
    )


def plot(values: dict[str, Any], path: Path) -> None:
    """Plot quality over diversity: what was tried on the choosing prompts, and the chosen rules on the reporting ones.

    A decoder and its controls share a colour. A line joins the chosen rules that no other one exceeds in both. The table
    names the rules: with several seeds they are too many for a legend.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    quality, title = "log_probability", "log-probability of a token under the model at τ = 1, nats"
    if values["has_verifier"]:
        quality, title = "correct", "share of correct texts"
    figure, axes = plt.subplots(figsize=(12, 6), layout="constrained")
    points = []
    colours = {name: plt.get_cmap("tab20")(place % 20) for place, name in enumerate(_without_controls(values))}
    for name, found in values["decoders"].items():
        decoder, _, control = name.partition(": ")
        colour = colours[decoder]
        tried = [(one["distinct"]["mean"], one[quality]["mean"]) for one in values["tried"] if one["decoder"] == name]
        tried = [point for point in tried if None not in point]
        axes.scatter([x for x, _ in tried], [y for _, y in tried], s=9, alpha=0.4, color=colour)
        x, y = found["prompts"]["distinct"], found["prompts"][quality]
        if None in (x["mean"], y["mean"]):
            continue
        points.append((x["mean"], y["mean"]))
        axes.errorbar(
            *points[-1],
            xerr=x["half_width"] or 0.0,
            yerr=y["half_width"] or 0.0,
            fmt=_MARKS.get(control, "o"),
            capsize=3,
            elinewidth=0.8,
            color=colour,
            label=name,
        )
    axes.plot(*zip(*frontier(points), strict=True), color="black", linewidth=0.8, label="frontier")
    if not values["has_verifier"]:
        axes.axhline(-values["human_loss"], color="black", linestyle=":", label="real text")
    axes.set(
        xlabel="distinct-2 (diversity)", ylabel=title, title="dots: tried on the choosing prompts; marks: the others"
    )
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _without_controls(values: dict[str, Any]) -> list[str]:
    return [name for name in values["decoders"] if ": " not in name]


def frontier(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points that no other one exceeds in both coordinates, from the largest x to the smallest."""
    found: list[tuple[float, float]] = []
    for point in sorted(points, reverse=True):
        if not found or point[1] > found[-1][1]:
            found.append(point)
    return found


def _show(values: dict[str, float | None] | None, factor: float, digits: int, *, missing: str = "") -> str:
    if values is None or values["mean"] is None:
        return missing
    half = values["half_width"]
    shown = f"{factor * values['mean']:.{digits}f}"
    return shown if half is None else f"{shown} ± {factor * half:.{digits}f}"


def _is_above(values: dict[str, float | None]) -> bool:
    mean, half = values["mean"], values["half_width"]
    return mean is not None and half is not None and mean - half > 0
