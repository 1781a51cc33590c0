"""The report of a finished run of a language model: a table of results, training curves, a histogram of τ, and a page.

The page shows a text whose tokens are coloured by τ.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast

from jobs.engine.metrics import TrackedRun
from jobs.engine.report import draw_curves, draw_histogram, html_page, results
from pipelines.text.tokenization import added_text, token_pieces
from tempnet.softmax.config import LOSS_KINDS

# A text as the pieces of its tokens (`token_pieces`), the τ with which each token was predicted, the entropy of that
# prediction at τ = 1, in nats, and what else is known of it (`describe_predictions`).
ColouredText = tuple[Sequence[str], Sequence[float], Sequence[float], Sequence[str]]

_OF_ROBUST_LOSS = (
    "At the optimum of the robust loss every prediction has the same entropy, so a prediction that the model is certain of "
    "gets a high τ, which evens it out, and an open one a low τ."
)
_OF_LIKELIHOOD = (
    "Here τ was fitted to likelihood: a high τ stands where the model is surer than it should be, a low τ where it is not "
    "sure enough. The order may be the opposite of that of the robust loss, which gives certain predictions a high τ."
)
_OF_ANY_LOSS = (
    "What a high τ means depends on what the TempNet learned from. Under the robust loss certain predictions get a high τ, "
    "because their entropy is raised to the wanted one; under likelihood (proper) or rewards the opposite may hold."
)


def is_robust(outcome: Mapping[str, Any]) -> bool:
    """Return whether a run's loss is a robust one, whose figures have a ρ."""
    kind = LOSS_KINDS.get(outcome["loss"])
    return kind is not None and kind.objective == "robust"


def summary_table(outcome: Mapping[str, Any]) -> str:
    """Return the results of a run as text for the terminal; what belongs to ρ is shown for losses that have one."""
    scores, rivals = outcome["validation"], outcome["rivals"]
    rows = [
        ("validation perplexity at τ = 1", _perplexity(scores["cross_entropy"])),
        ("validation perplexity at τ", _perplexity(scores["cross_entropy_tau"])),
        ("mean τ", f"{scores['tau_mean']:.3f}"),
        ("5 % / 95 % of τ", f"{scores['tau_q05']:.3f} / {scores['tau_q95']:.3f}"),
        ("standard deviation of τ", f"{scores['tau_std']:.3f}"),
        ("share of τ at τ₀ / τ_max", f"{scores['tau_share_lower_bound']:.2%} / {scores['tau_share_upper_bound']:.2%}"),
        ("Spearman(τ, entropy at τ = 1)", f"{scores['tau_entropy_spearman']:+.2f}"),
    ]
    if is_robust(outcome):
        rho = _last_rho(outcome)
        target = outcome["target_entropy"] + outcome["rho"] - rho
        rows += [
            (
                f"robust loss at the oracle's τ*, mean {rivals['oracle_tau_mean']:.3f}",
                f"{rivals['robust/oracle_loss']:.4f}",
            ),
            ("regret: robust loss at τ above it", f"{rivals['robust/loss'] - rivals['robust/oracle_loss']:.4f}"),
            ("ρ (target entropy)", f"{rho:.4f} ({target:.4f} nats)"),
        ]
    return results(rows, outcome, "tokens")


def _last_rho(outcome: Mapping[str, Any]) -> float:
    """Return the ρ that the last validation has: with `temperature.target_tau` it is not the one of the beginning."""
    return float(outcome["validation"].get("rho", outcome["rho"]))


def _perplexity(cross_entropy: float) -> str:
    return f"{math.exp(cross_entropy) if cross_entropy < 700 else math.inf:.2f}"  # near τ₀ it may be thousands of nats


def write_report(
    directory: Path, outcome: Mapping[str, Any], tokenizer: PreTrainedTokenizerFast, tracked: TrackedRun | None
) -> None:
    """Write `tokens.html`, `histogram.png` and, if the run is logged to MLflow, `curves.png`."""
    passage = outcome["passage"]
    tokens = token_pieces(tokenizer, passage["token"])
    found = (passage[name] for name in ("token", "entropy_tau", "likeliest", "probability"))
    notes = describe_predictions(tokenizer, *found)
    page = coloured_page(
        title=f"{outcome['run']}: the temperature of every token",
        sections={"A validation passage": (tokens, passage["tau"], passage["entropy"], notes)},
        summary=summary_table(outcome),
        meaning=_OF_ROBUST_LOSS if is_robust(outcome) else _OF_LIKELIHOOD,
    )
    (directory / "tokens.html").write_text(page)
    with_rho = is_robust(outcome)
    counts = {**outcome, "histograms": {"token": outcome["histogram"]}}
    draw_histogram(directory / "histogram.png", counts, band=(0.7, 1.0) if with_rho else None)
    if tracked:
        curves = _CURVES
        if with_rho:
            curves = _CURVES | {"τ": (*_CURVES["τ"], "train/tau_oracle_mean")}
        title = (
            f"{outcome['run']}: ρ = {_last_rho(outcome):.3f}" if with_rho else f"{outcome['run']}: {outcome['loss']}"
        )
        draw_curves(directory / "curves.png", tracked, curves, title)


_CURVES = {
    "loss (training objective)": ("train/loss",),
    "cross-entropy, nats a token": (
        "train/cross_entropy", "train/cross_entropy_tau", "validation/cross_entropy", "validation/cross_entropy_tau",
    ),
    "τ": ("train/tau_q05", "train/tau_mean", "train/tau_q95"),
    "Spearman(τ, entropy at τ = 1)": ("train/tau_entropy_spearman",),
}  # fmt: skip


def coloured_page(
    *, title: str, sections: Mapping[str, ColouredText], summary: str = "", meaning: str = _OF_ANY_LOSS
) -> str:
    """Return a self-contained HTML page that colours every token by its τ, and says on hover or tap what was predicted.

    The colour scale ranges from the 2 % to the 98 % quantile of τ. Tokens that make one character together are one span
    with the mean of their τ. `sections` maps headings to texts; `summary` stands at the end of the page.
    """
    every_tau = np.array([value for _, taus, *_ in sections.values() for value in taus])
    low, high = np.quantile(every_tau, [0.02, 0.98]) if len(every_tau) else (0.0, 1.0)
    low, high = (low, high) if high > low else (low - 1e-6, high + 1e-6)
    scale = "".join(
        f'<span style="background:{_colour(share)}">&nbsp;{low + share * (high - low):.2f}&nbsp;</span>'
        for share in np.linspace(0, 1, 9)
    )
    body = []
    for heading, text in sections.items():
        spans = "".join(
            f'<span tabindex="0" style="background:{_colour((float(np.mean(tau)) - low) / (high - low))}" '
            f'title="τ {_list(tau, 3)} · entropy {_list(entropy, 2)} nats at τ = 1{html.escape("".join(notes))}">'
            f"{html.escape(piece)}</span>"
            for piece, tau, entropy, notes in _characters(*text)
        )
        body.append(f"<h2>{html.escape(heading)}</h2>\n<p class='text'>{spans}</p>")
    return html_page(
        title,
        "<p>The colour of a token is the temperature τ with which it was predicted; point at it, or tap it, for τ and "
        f'for what was predicted. {html.escape(meaning)}</p>\n<p class="scale">{scale}</p>\n{"".join(body)}\n'
        f"<pre>{html.escape(summary)}</pre>",
    )


def describe_predictions(
    tokenizer: PreTrainedTokenizerFast,
    ids: list[int],
    entropies: Sequence[float],
    likeliest: Sequence[Sequence[int]],
    probabilities: Sequence[Sequence[float]],
) -> list[str]:
    """Return what a tooltip says of each prediction at τ: its entropy in nats, and its likeliest tokens as they would read
    after `ids` so far, with their probabilities.
    """
    notes = []
    for place, (entropy, tokens, shares) in enumerate(zip(entropies, likeliest, probabilities, strict=True)):
        texts = [added_text(tokenizer, ids[:place], int(token)) or tokenizer.decode([int(token)]) for token in tokens]
        shown = (
            f"{json.dumps(text, ensure_ascii=False)} {share:.1%}" for text, share in zip(texts, shares, strict=True)
        )
        notes.append(f", {entropy:.2f} at τ · likeliest at τ: {', '.join(shown)}")
    return notes


def _characters(
    pieces: Sequence[str], taus: Sequence[float], entropies: Sequence[float], notes: Sequence[str]
) -> Iterator[tuple[str, list[float], list[float], list[str]]]:
    """Yield pieces with what is known of their tokens; tokens with an empty piece belong to the next one that has text."""
    tau: list[float] = []
    entropy: list[float] = []
    note: list[str] = []
    for piece, own_tau, own_entropy, own_note in zip(pieces, taus, entropies, notes, strict=True):
        tau.append(own_tau)
        entropy.append(own_entropy)
        note.append(own_note)
        if piece:
            yield piece, tau, entropy, note
            tau, entropy, note = [], [], []


def _list(values: Sequence[float], digits: int) -> str:
    return ", ".join(f"{value:.{digits}f}" for value in values)


def _colour(share: float) -> str:
    """Return the colour for a share in [0, 1]: from blue (low τ) through white to red (high τ)."""
    from matplotlib import colormaps  # only where a page is written, because it takes a second

    share = min(1.0, max(0.0, float(share)))
    red, green, blue, _ = colormaps["coolwarm"](0.12 + 0.76 * share)
    return f"#{round(255 * red):02x}{round(255 * green):02x}{round(255 * blue):02x}"
