"""Spans against their definition: bounds, the laws of lengths and places, spacing, purity."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import beta, chisquare, kstest

from pipelines.sentences.spans import SpanConfig, Spans, Strategy, gather_spans, sample_spans

STRATEGIES = ("any", "subsuming", "adjacent")


def ends(spans: Spans) -> tuple[np.ndarray, np.ndarray]:
    return spans.anchor_start + spans.anchor_length, spans.positive_start + spans.positive_length


@st.composite
def configurations(draw: st.DrawFn) -> SpanConfig:
    longest = draw(st.integers(2, 60))
    anchors = draw(st.integers(1, 4))
    return SpanConfig(
        num_anchors=anchors,
        num_positives=draw(st.integers(1, 3)),
        min_length=draw(st.integers(1, longest)),
        max_length=longest,
        strategy=draw(st.sampled_from(STRATEGIES)),
        min_num_tokens=draw(st.sampled_from([0, (anchors + 1) * longest])),
    )


@given(configurations(), st.integers(0, 2**40), st.integers(0, 30), st.integers(0, 400))
def test_bounds_spacing_and_the_positives_relation(config: SpanConfig, seed: int, epoch: int, extra: int) -> None:
    num_tokens = config.least_num_tokens + np.arange(extra, extra + 40)
    spans = sample_spans(num_tokens, np.arange(40), seed=seed, epoch=epoch, config=config)
    anchor_end, positive_end = ends(spans)
    assert spans.anchor_start.min() >= 0
    assert (anchor_end <= num_tokens[:, None]).all()
    assert spans.positive_start.min() >= 0
    assert (positive_end <= num_tokens[:, None, None]).all()
    assert ((config.min_length <= spans.anchor_length) & (spans.anchor_length <= config.max_length)).all()
    assert ((spans.positive_length >= 1) & (spans.positive_length <= config.max_length)).all()
    gap = np.where(spans.is_crowded, config.max_length, 2 * config.max_length)
    assert (np.diff(spans.anchor_start, axis=1) >= gap[:, None]).all()
    if not config.min_num_tokens:
        assert not spans.is_crowded.any()
    first, end = spans.anchor_start[..., None], anchor_end[..., None]
    if config.strategy == "subsuming":
        assert ((spans.positive_start >= first) & (positive_end <= end)).all()
        return
    if config.strategy == "adjacent":
        assert ((spans.positive_start == end) | (positive_end == first)).all()
        room = np.maximum(first, num_tokens[:, None, None] - end)
        assert ((spans.positive_length >= config.min_length) | (spans.positive_length == room)).all()
        return
    assert ((spans.positive_start <= end) & (positive_end >= first)).all()
    assert (spans.positive_length >= config.min_length).all()


@given(configurations(), st.integers(0, 2**40), st.permutations(range(12)))
def test_a_document_has_its_spans_whoever_reads_it(config: SpanConfig, seed: int, order: list[int]) -> None:
    num_tokens = config.least_num_tokens + 7 * np.arange(12)
    keys = np.arange(12) * 1_000_003
    together = sample_spans(num_tokens, keys, seed=seed, epoch=3, config=config)
    for part in (order[:5], order[5:]):
        alone = sample_spans(num_tokens[part], keys[part], seed=seed, epoch=3, config=config)
        for name in Spans.__slots__:
            np.testing.assert_array_equal(getattr(alone, name), getattr(together, name)[part])


def test_seed_epoch_and_document_change_the_spans() -> None:
    config = SpanConfig()
    num_tokens = np.full(200, 4096)

    def starts(seed: int, epoch: int, first_key: int = 0) -> np.ndarray:
        keys = first_key + np.arange(200)
        return sample_spans(num_tokens, keys, seed=seed, epoch=epoch, config=config).anchor_start

    assert len(np.unique(starts(0, 0), axis=0)) > 195
    for other in (starts(1, 0), starts(0, 1), starts(0, 0, 200)):
        assert (other != starts(0, 0)).any(axis=1).mean() > 0.95


def test_lengths_follow_their_beta_laws() -> None:
    config = SpanConfig(min_length=1, max_length=1_000_001, num_anchors=2, num_positives=1)
    num_tokens = np.full(20_000, 2 * config.least_num_tokens)
    spans = sample_spans(num_tokens, np.arange(20_000), seed=1, epoch=0, config=config)
    for lengths, law in ((spans.anchor_length, beta(4, 2)), (spans.positive_length, beta(2, 4))):
        assert kstest((lengths.ravel() - 1) / 1_000_000, law.cdf).pvalue > 0.001
    assert abs(np.corrcoef(spans.anchor_length[:, 0], spans.positive_length[:, 0, 0])[0, 1]) < 0.03
    assert abs(np.corrcoef(spans.anchor_length.T)[0, 1]) < 0.03


def test_anchor_starts_are_uniform_over_all_placements() -> None:
    """Compared with all placements, every pair of starts that keeps the spacing is equally likely."""
    config = SpanConfig(num_anchors=2, num_positives=1, min_length=3, max_length=3)
    num_documents, num_tokens = 60_000, 16
    spans = sample_spans(np.full(num_documents, num_tokens), np.arange(num_documents), seed=5, epoch=0, config=config)
    allowed = [(a, b) for a, b in itertools.product(range(14), repeat=2) if b - a >= 6]
    counts = Counter(map(tuple, spans.anchor_start.tolist()))
    assert set(counts) == set(allowed)
    assert chisquare([counts[pair] for pair in allowed]).pvalue > 0.001


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_positive_starts_are_uniform_in_their_range(strategy: Strategy) -> None:
    config = SpanConfig(num_anchors=1, num_positives=1, min_length=4, max_length=4, strategy=strategy)
    spans = sample_spans(np.full(200_000, 40), np.arange(200_000), seed=2, epoch=0, config=config)
    inside = (spans.anchor_start >= 4) & (spans.anchor_start <= 32)
    offsets = (spans.positive_start[..., 0] - spans.anchor_start)[inside]
    allowed = {"any": range(-4, 5), "subsuming": range(1), "adjacent": (-4, 4)}[strategy]
    counts = Counter(offsets.tolist())
    assert set(counts) == set(allowed)
    assert len(allowed) == 1 or chisquare([counts[offset] for offset in allowed]).pvalue > 0.001


def test_rows_hold_the_tokens_of_their_spans_and_padding() -> None:
    tokens = np.arange(100, 200, dtype=np.uint16)
    start, length = np.array([[0, 10], [97, 50]]), np.array([[3, 1], [3, 4]])
    rows, mask = gather_spans(tokens, start, length, pad_id=7)
    assert rows.tolist() == [[100, 101, 102, 7], [110, 7, 7, 7], [197, 198, 199, 7], [150, 151, 152, 153]]
    assert mask.tolist() == [[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_anchors": 0}, "num_anchors = 0"),
        ({"min_length": 9, "max_length": 8}, "max_length = 8 is below min_length = 9"),
        ({"strategy": "near"}, "strategy = 'near'"),
        ({"min_num_tokens": 1535}, r"min_num_tokens = 1535 is below \(num_anchors \+ 1\)·max_length = 1536"),
    ],
)
def test_impossible_spans_are_refused_by_name(values: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SpanConfig(**values)


def test_a_short_document_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="document 8 has 2047 tokens, and spans need 2048"):
        sample_spans(np.array([3000, 2047]), np.array([7, 8]), seed=0, epoch=0, config=SpanConfig())
