"""Spans of documents: bounds, spacing and laws of what is drawn, and the arrays that are read against the stored text."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import beta, chisquare, kstest

from pipelines.sentences.spans import IGNORE_INDEX, SpanConfig, Spans, SpanSource, Strategy, sample_spans
from pipelines.text.manifest import ArchiveEntry, Manifest, ShardEntry
from pipelines.text.packing import DocumentConfig
from pipelines.text.tokenization import SpecialTokens, load_tokenizer, train_bpe, train_wordpiece

STRATEGIES = ("any", "subsuming", "adjacent")


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
    anchor_end, positive_end = spans.anchor_start + spans.anchor_length, spans.positive_start + spans.positive_length
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
    elif config.strategy == "adjacent":
        assert ((spans.positive_start == end) | (positive_end == first)).all()
        room = np.maximum(first, num_tokens[:, None, None] - end)
        assert ((spans.positive_length >= config.min_length) | (spans.positive_length == room)).all()
    else:
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


# ---- documents as rows, and their spans as arrays --------------------------------------------------------------------

SPECIAL = SpecialTokens(opening=(2,), closing=(3,), pad_id=0, mask_id=4, vocab_size=90_000)
SPANS = SpanConfig(num_anchors=2, num_positives=3, min_length=4, max_length=10, min_num_tokens=30)


@pytest.fixture(scope="module")
def documents() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(5, 90_000, size=size) for size in rng.integers(20, 200, size=60)]


@pytest.fixture(scope="module")
def manifest(documents: list[np.ndarray], tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    """Write a prepared data set of three shards, without Ray."""
    directory = tmp_path_factory.mktemp("prepared")
    layout = DocumentConfig(least_num_tokens=30, vocab_size=90_000)
    shards = []
    for number, part in enumerate(np.array_split(np.arange(len(documents)), 3)):
        table = pa.Table.from_batches(
            list(layout.rows([documents[index] for index in part], num_rows=7)), layout.schema
        )
        with pa.OSFile(str(directory / f"{number}.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as file:
            file.write_table(table)
        shards.append(ShardEntry(file=f"{number}.arrow", archive="", num_rows=table.num_rows, num_tokens=0, digest=""))
    entry = ArchiveEntry(path="", num_bytes=0, num_documents=len(documents), problems={}, examples=[], shards=shards)
    return Manifest(directory=str(directory), tokenizer_digest="", layout=layout, archives=[entry])


def test_a_share_of_the_documents_is_a_function_of_seed_and_document(documents: list[np.ndarray]) -> None:
    def kept(share: float, seed: int = 0, order: slice = slice(None)) -> set[bytes]:
        layout = DocumentConfig(least_num_tokens=30, vocab_size=90_000, share=share, share_seed=seed)
        rows = pa.Table.from_batches(list(layout.rows(documents[order])), layout.schema)
        return {tokens.values.to_numpy().tobytes() for tokens in rows.column("tokens")}

    third, half, whole = (kept(share) for share in (0.33, 0.5, 1.0))
    assert third < half < whole
    assert 0.3 < len(half) / len(whole) < 0.7
    assert (
        half == kept(0.5, order=slice(None, None, -1)) == kept(0.5, order=slice(30)) | kept(0.5, order=slice(30, None))
    )
    assert half != kept(0.5, seed=1)


def source(manifest: Manifest, **options: float) -> SpanSource:
    return SpanSource(**{"manifest": manifest, "spans": SPANS, "special_tokens": SPECIAL, "seed": 5, **options})


def every(manifest: Manifest) -> tuple[np.ndarray, np.ndarray]:
    sizes = manifest.shard_sizes
    shards = np.repeat(np.arange(len(sizes)), sizes)
    return shards, np.concatenate([np.arange(size) for size in sizes])


@given(st.lists(st.integers(0, 40), max_size=30), st.integers(1, 30), st.sampled_from([100, 70_000]))
def test_rows_are_the_documents_that_are_long_enough(lengths: list[int], least: int, vocab_size: int) -> None:
    rng = np.random.default_rng(0)
    documents = [rng.integers(vocab_size, size=length) for length in lengths]
    layout = DocumentConfig(least_num_tokens=least, vocab_size=vocab_size)
    batches = layout.rows(iter(documents), num_rows=4)
    assert [row for batch in batches for row in batch.to_pylist()] == [
        {"document": at, "tokens": tokens.tolist(), "num_tokens": len(tokens)}
        for at, tokens in enumerate(documents)
        if len(tokens) >= least
    ]


def test_rows_of_a_batch_are_the_spans_between_special_tokens(documents: list[np.ndarray], manifest: Manifest) -> None:
    shards, rows = every(manifest)
    order = np.random.default_rng(1).permutation(len(shards))
    batch = source(manifest, mask_share=0.0).read(shards[order], rows[order], 2)
    kept = [tokens for tokens in documents if len(tokens) >= 30]
    assert batch["ids"].tolist() == order.tolist()  # dense, in stored order
    lengths = np.array([len(kept[index]) for index in order])
    expected = sample_spans(lengths, order, seed=5, epoch=2, config=SPANS)
    assert batch["is_crowded"].tolist() == expected.is_crowded.tolist()
    assert (batch["mlm_labels"] == IGNORE_INDEX).all()
    for place, index in enumerate(order):
        for anchor in range(2):
            spans = [("anchor", (place, anchor), expected.anchor_start, expected.anchor_length)]
            spans += [
                ("positive", (place, anchor, k), expected.positive_start, expected.positive_length) for k in range(3)
            ]
            for name, at, start, length in spans:
                row, size = batch[f"{name}_ids"][at], batch[f"{name}_lengths"][at]
                inside = kept[index][start[at] : start[at] + length[at]]
                assert size == length[at] + 2
                assert row[:size].tolist() == [2, *inside.tolist(), 3]
                assert (row[size:] == 0).all()


def test_reading_depends_on_seed_epoch_and_document_alone(manifest: Manifest) -> None:
    shards, rows = every(manifest)
    whole = source(manifest).read(shards, rows, 0)
    for other in (source(manifest).read(shards, rows, 1), source(manifest, seed=6).read(shards, rows, 0)):
        assert (whole["digest"] != other["digest"]).all()
    for part in np.array_split(np.random.default_rng(0).permutation(len(shards)), 4):
        batch = source(manifest).read(shards[part], rows[part], 0)
        for name, value in batch.items():
            np.testing.assert_array_equal(value, whole[name][part])


def test_masking_follows_its_shares_and_spares_special_tokens(manifest: Manifest) -> None:
    shards, rows = every(manifest)
    num_tokens = num_chosen = num_mask = num_kept = 0
    for epoch in range(20):
        before, after = (source(manifest, mask_share=share).read(shards, rows, epoch) for share in (0.0, 0.15))
        ids, masked, labels = before["anchor_ids"], after["anchor_ids"], after["mlm_labels"]
        chosen = labels != IGNORE_INDEX
        column = np.arange(ids.shape[-1])
        is_inside = (column > 0) & (column < before["anchor_lengths"][..., None] - 1)
        assert not (chosen & ~is_inside).any()
        assert (labels[chosen] == ids[chosen]).all()
        assert (masked[~chosen] == ids[~chosen]).all()
        np.testing.assert_array_equal(before["positive_ids"], after["positive_ids"])
        num_tokens += is_inside.sum()
        num_chosen += chosen.sum()
        num_mask += (masked[chosen] == SPECIAL.mask_id).sum()
        num_kept += (masked[chosen] == ids[chosen]).sum()
    # The tolerance is four standard deviations of these binomials.
    for count, total, share in (
        (num_chosen, num_tokens, 0.15),
        (num_mask, num_chosen, 0.8),
        (num_kept, num_chosen, 0.1),
    ):
        assert abs(count / total - share) < 4 * np.sqrt(share * (1 - share) / total)


def test_documents_that_are_too_short_for_the_spans_are_refused(manifest: Manifest) -> None:
    with pytest.raises(ValueError, match="of 30 tokens or more, but the spans need 40: prepare it again"):
        source(manifest, spans=SpanConfig(num_anchors=2, min_length=4, max_length=10))


def test_special_tokens_are_what_the_tokenizer_puts_around_a_text(tmp_path: Path) -> None:
    tokenizer = train_wordpiece(["a small house beside a big house"], 200)
    special = SpecialTokens.of(tokenizer)
    assert [*special.opening, *tokenizer.encode("big", add_special_tokens=False), *special.closing] == tokenizer.encode(
        "big"
    )
    assert (special.pad_id, special.mask_id) == (tokenizer.pad_token_id, tokenizer.mask_token_id)
    assert special.num_added == 2
    train_bpe(["plain text"], 300).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has no pad_token: use the tokenizer of a masked language model"):
        SpecialTokens.of(load_tokenizer(str(tmp_path)))
