"""The results of the bench: figures as plain values, one table, one line of conclusion, and a frontier plot."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jobs.engine.tables import markdown_table
from jobs.scoring.decoders.bench import CONSTANT, Comparison
from jobs.scoring.decoders.quality import PromptFigures
from tempnet.headroom.gains import Interval

PLAIN = ("log_probability", "distinct", "self_bleu")
CHECKED = ("correct", "distinct_correct", "pass_at_k", "maj_at_k")


def figures(comparison: Comparison, *, k: int) -> dict[str, Any]:
    """Return all figures; losses and gains in nats per token, shares as numbers from 0 to 1.

    Every figure is a pair of mean and half-width of its 95 % interval. NaN and infinity are None, which JSON knows.
    """
    sums = comparison.sums
    decoders: dict[str, Any] = {}
    for name, choice in comparison.for_text.items():
        text = {
            "rule": choice.rule.label,
            "loss": pair(sums.loss(name)),
            "gain": pair(sums.gain(name, CONSTANT)),
            "brier": pair(sums.mean(name, "brier")),
            "ece": pair(sums.calibration_error(name)),
            "excluded": pair(sums.mean(name, "excluded")),
        }
        if f"{name}: MeanShift" in sums.sums:
            text["gain_over_mean_shift"] = pair(sums.gain(name, f"{name}: MeanShift"))
        decoders[name] = {"text": text}
    for name, found in comparison.prompts.items():
        decoders[name]["prompts"] = {"rule": comparison.for_prompts[name].rule.label, **_prompt_values(found)}
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
        values[name] = None if getattr(found, name) is None else pair(getattr(found, name))
    return values


def pair(interval: Interval) -> dict[str, float | None]:
    """Return an interval as a mapping, with None for what is not finite."""
    return {name: value if math.isfinite(value) else None for name, value in interval._asdict().items()}


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
    """Plot quality over diversity: what was tried on the choosing prompts, and the chosen rules on the reporting ones."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    quality, label = (
        ("correct", "share of correct texts")
        if values["has_verifier"]
        else (
            "log_probability",
            "log-probability of a token under the model at τ = 1, nats",
        )
    )
    figure, axes = plt.subplots(figsize=(9, 6), layout="constrained")
    names = list(values["decoders"])
    colours = {name: plt.get_cmap("tab20")(place % 20) for place, name in enumerate(names)}
    for name in names:
        tried = sorted(
            (found["distinct"]["mean"], found[quality]["mean"])
            for found in values["tried"]
            if found["decoder"] == name and found["distinct"]["mean"] is not None
        )
        if tried:
            axes.plot(*zip(*tried, strict=True), linestyle="none", marker=".", alpha=0.4, color=colours[name])
        found = values["decoders"][name]["prompts"]
        x, y = found["distinct"], found[quality]
        if x["mean"] is None or y["mean"] is None:
            continue
        axes.errorbar(
            x["mean"],
            y["mean"],
            xerr=x["half_width"] or 0.0,
            yerr=y["half_width"] or 0.0,
            fmt="s" if ": " in name else "o",
            capsize=3,
            color=colours[name],
            label=f"{name}" if found["rule"] == name else f"{name}: {found['rule']}",
        )
    if not values["has_verifier"]:
        axes.axhline(-values["human_loss"], color="black", linestyle=":", label="real text")
    axes.set(
        xlabel="distinct-2 (diversity)", ylabel=label, title="dots: tried on the choosing prompts; bars: the others"
    )
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _show(values: dict[str, float | None] | None, factor: float, digits: int, *, missing: str = "") -> str:
    if values is None or values["mean"] is None:
        return missing
    half = values["half_width"]
    shown = f"{factor * values['mean']:.{digits}f}"
    return shown if half is None else f"{shown} ± {factor * half:.{digits}f}"


def _is_above(values: dict[str, float | None]) -> bool:
    mean, half = values["mean"], values["half_width"]
    return mean is not None and half is not None and mean - half > 0
