"""The table and the coloured page."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

import pytest

from jobs.language_models.report import coloured_page, has_constant_temperature, summary_table


class Spans(HTMLParser):
    """Collects (background, title, text) of every token."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens: list[list[str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag == "span" and values.get("title"):
            self.tokens.append([values["style"] or "", values["title"] or "", ""])

    def handle_data(self, data: str) -> None:
        if self.tokens and not self.tokens[-1][2]:
            self.tokens[-1][2] = data


def test_tokens_are_escaped_and_told_apart() -> None:
    tokens, tau = ["<script>", " a&b", '"x"', " d"], [0.2, 0.8, 1.4, 1.4]
    page = coloured_page(title="T", sections={"<S>": (tokens, tau, [4.0, 3.0, 1.0, 1.0])})
    assert "<script>" not in page
    parser = Spans()
    parser.feed(page)
    assert [token[2] for token in parser.tokens] == tokens
    assert parser.tokens[0][1] == "τ 0.200 · entropy 4.00 nats"
    colours = [token[0] for token in parser.tokens]
    assert len(set(colours)) == 3
    assert colours[2] == colours[3]


def test_a_constant_temperature_is_one_colour_and_no_error() -> None:
    parser = Spans()
    parser.feed(coloured_page(title="T", sections={"S": (["a", "b"], [1.0, 1.0], [1.0, 2.0])}))
    assert len({token[0] for token in parser.tokens}) == 1
    coloured_page(title="T", sections={})


def outcome(tau_std: float, loss: str = "dro") -> dict[str, Any]:
    scores = dict.fromkeys(
        ("tau_mean", "tau_q05", "tau_q95", "tau_share_lower_bound", "tau_share_upper_bound", "tau_entropy_spearman",
         "cross_entropy", "cross_entropy_tau"), 1.0
    )  # fmt: skip
    rivals = {
        "robust_loss": 0.5, "robust_loss_best_constant": 0.9, "robust_loss_oracle": 0.4, "best_constant_tau": 0.8,
        "oracle_tau_mean": 0.7,
    }  # fmt: skip
    return {
        "validation": scores | {"tau_std": tau_std}, "rivals": rivals, "rho": 3.0, "target_entropy": 4.0, "loss": loss,
        "tokens_per_second": 1000.0, "data_wait_share": 0.01, "num_steps": 10, "num_epochs": 0.5,
    }  # fmt: skip


@pytest.mark.parametrize(("tau_std", "loss", "failed"), [(0.2, "dro", False), (0.001, "dro", True), (0.0, "ce", False)])
def test_a_constant_tempnet_is_called_a_failure(tau_std: float, loss: str, failed: bool) -> None:
    table = summary_table(outcome(tau_std, loss))
    assert has_constant_temperature(outcome(tau_std, loss)) == failed
    assert ("FAILED" in table) == failed
    assert "regret against the oracle" in table
    assert "0.1000" in table
    assert "2.72" in table  # perplexity e
