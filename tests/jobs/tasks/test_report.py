"""Test the summary table of a run and the page whose tokens are coloured by temperature."""

from __future__ import annotations

import html
import re

from jobs.tasks.language_model.report import coloured_page, summary_table


def spans(page: str) -> list[tuple[str, ...]]:
    """Return (background, title, text) of every token."""
    found = re.findall(r'<span\b[^>]*?style="([^"]*)"[^>]*?title="([^"]*)"[^>]*>([^<]*)</span>', page)
    return [tuple(map(html.unescape, values)) for values in found]


def test_tokens_are_escaped_and_told_apart() -> None:
    tokens, tau = ["<script>", " a&b", '"x"', " d"], [0.2, 0.8, 1.4, 1.4]
    note = ' · likeliest at τ: " <b>" 75.0%'
    page = coloured_page(title="T", sections={"<S>": (tokens, tau, [4.0, 3.0, 1.0, 1.0], [note, "", "", ""])})
    assert "<script>" not in page
    # A phone shows it in its width, and a tapped token, which takes the focus, shows its title.
    assert '<meta name="viewport" content="width=device-width">' in page
    assert page.count('<span tabindex="0"') == len(tokens)
    assert ".text span:focus::after { content: attr(title)" in page
    colours, titles, texts = zip(*spans(page), strict=True)
    assert list(texts) == tokens
    assert titles[0] == "τ 0.200 · entropy 4.00 nats at τ = 1" + note
    assert len(set(colours)) == 3
    assert colours[2] == colours[3]


def test_a_constant_temperature_is_one_colour_and_tokens_of_a_character_one_span() -> None:
    page = coloured_page(title="T", sections={"S": (["a", "", "–"], [1.0, 1.0, 1.0], [1.0, 2.0, 3.0], [""] * 3)})
    assert [(title, text) for _, title, text in spans(page)] == [
        ("τ 1.000 · entropy 1.00 nats at τ = 1", "a"),
        ("τ 1.000, 1.000 · entropy 2.00, 3.00 nats at τ = 1", "–"),
    ], "tokens of one character are one span"
    assert len({colour for colour, _, _ in spans(page)}) == 1
    coloured_page(title="T", sections={})


def test_the_table_shows_perplexity_and_what_belongs_to_the_loss() -> None:
    scores = dict.fromkeys(
        ("tau_mean", "tau_std", "tau_q05", "tau_q95", "tau_share_lower_bound", "tau_share_upper_bound",
         "tau_entropy_spearman", "cross_entropy", "cross_entropy_tau"), 1.0
    )  # fmt: skip
    outcome = {
        "validation": scores, "rivals": {"robust/loss": 0.5, "robust/oracle_loss": 0.4, "oracle_tau_mean": 0.7},
        "rho": 3.0, "target_entropy": 4.0, "loss": "dro", "tokens_per_second": 1000.0, "data_wait_share": 0.01,
        "num_steps": 10, "num_epochs": 0.5,
    }  # fmt: skip
    table = summary_table(outcome)
    assert "regret" in table
    assert "0.1000" in table
    assert "ρ (target entropy)" in table
    for loss in ("proper", "ce", "distil"):
        assert not re.search("regret|ρ|robust", summary_table(outcome | {"loss": loss}))
    assert "2.72" in table  # The perplexity is e.
    assert "learned τ" not in table  # Plain cross-entropy learns no τ.
