"""The benchmark of the band search: its edits fit the product, and the search keeps its promises in its worlds."""

from __future__ import annotations

import functools

import pytest

from benchmarks.band_search import KINDS, RULES, Outcome, edit_product, make_worlds, run_search


@functools.cache
def run_searches(rule: str, kind: str, num_worlds: int) -> list[Outcome]:
    """Returns how searches without a rule went in the worlds of a kind."""
    product = edit_product(RULES[rule])
    return [run_search(world, product) for world in make_worlds(kind, num_worlds)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_search_stays_within_a_quarter_of_the_grid_and_mostly_finds_the_band(kind: str) -> None:
    outcomes = run_searches("whole", kind, 20)
    assert all(outcome.share <= 0.25 + 1e-9 for outcome in outcomes)
    assert sum(outcome.found for outcome in outcomes) >= (20 if kind.startswith("recorded") else 12)


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "whole"])
def test_a_rule_that_is_taken_out_changes_some_search(rule: str) -> None:
    """The edits of a rule still hit it. Outcomes are compared as text, because some of their figures are NaN."""
    assert any(str(run_searches(rule, kind, 20)) != str(run_searches("whole", kind, 20)) for kind in KINDS)


def test_an_edit_whose_text_is_gone_is_refused() -> None:
    (module, _, _) = RULES["the swing"][0]
    with pytest.raises(AssertionError, match="is not once in"):
        edit_product([(module, "no such text", "")])
