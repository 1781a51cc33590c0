"""Documents as rows, and their spans as training arrays, against the stored text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.sentences.span_source import IGNORE_INDEX, SpanSource
from pipelines.sentences.spans import SpanConfig, sample_spans
from pipelines.text.documents import DocumentConfig
from pipelines.text.manifest import ArchiveEntry, Manifest, ShardEntry
from pipelines.text.tokenization import SpecialTokens, load_tokenizer, train_bpe, train_wordpiece

SPECIAL = SpecialTokens(opening=(2,), closing=(3,), pad_id=0, mask_id=4, vocab_size=90_000)
SPANS = SpanConfig(num_anchors=2, num_positives=3, min_length=4, max_length=10, min_num_tokens=30)


def stored(directory: Path, documents: list[np.ndarray], *, num_shards: int = 3, vocab_size: int = 90_000) -> Manifest:
    """Write a prepared data set without Ray."""
    layout = DocumentConfig(least_num_tokens=30, vocab_size=vocab_size)
    shards = []
    for number, part in enumerate(np.array_split(np.arange(len(documents)), num_shards)):
        batches = list(layout.rows([documents[index] for index in part], num_documents_per_batch=7))
        with (
            pa.OSFile(str(directory / f"{number}.arrow"), "wb") as sink,
            pa.ipc.new_file(sink, layout.schema) as writer,
        ):
            for batch in batches:
                writer.write_batch(batch)
        shards.append(
            ShardEntry(
                file=f"{number}.arrow",
                archive=f"{number}.jsonl",
                num_rows=sum(batch.num_rows for batch in batches),
                num_tokens=0,
                digest="",
            )
        )
    entry = ArchiveEntry(path="", num_bytes=0, num_documents=len(documents), problems={}, examples=[], shards=shards)
    return Manifest(directory=str(directory), tokenizer_digest="", layout=layout, archives=[entry])


@pytest.fixture(scope="module")
def documents() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(5, 90_000, size=size) for size in rng.integers(20, 200, size=60)]


@pytest.fixture(scope="module")
def manifest(documents: list[np.ndarray], tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    return stored(tmp_path_factory.mktemp("prepared"), documents)


def every(manifest: Manifest) -> tuple[np.ndarray, np.ndarray]:
    sizes = manifest.shard_sizes
    shards = np.repeat(np.arange(len(sizes)), sizes)
    return shards, np.concatenate([np.arange(size) for size in sizes])


@given(st.lists(st.integers(0, 40), max_size=30), st.integers(1, 30), st.sampled_from([100, 70_000]))
def test_rows_are_the_documents_that_are_long_enough(lengths: list[int], least: int, vocab_size: int) -> None:
    rng = np.random.default_rng(0)
    documents = [rng.integers(vocab_size, size=length) for length in lengths]
    layout = DocumentConfig(least_num_tokens=least, vocab_size=vocab_size)
    rows = [
        row for batch in layout.rows(iter(documents), num_documents_per_batch=4) for row in batch.to_pylist()
    ]  # fmt: skip
    assert [row["document"] for row in rows] == [at for at, length in enumerate(lengths) if length >= least]
    for row in rows:
        assert row["tokens"] == documents[row["document"]].tolist()
        assert row["num_tokens"] == lengths[row["document"]]


def test_rows_of_a_batch_are_the_spans_between_special_tokens(documents: list[np.ndarray], manifest: Manifest) -> None:
    source = SpanSource(manifest=manifest, spans=SPANS, special_tokens=SPECIAL, seed=5, mask_share=0.0)
    shards, rows = every(manifest)
    order = np.random.default_rng(1).permutation(len(shards))
    batch = source.read(shards[order], rows[order], 2)
    kept = [tokens for tokens in documents if len(tokens) >= 30]
    assert batch["ids"].tolist() == order.tolist()  # dense, in stored order
    expected = sample_spans(
        np.array([len(kept[index]) for index in order]), order, seed=5, epoch=2, config=SPANS
    )  # fmt: skip
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
    source = SpanSource(manifest=manifest, spans=SPANS, special_tokens=SPECIAL, seed=5)
    shards, rows = every(manifest)
    whole, other_epoch = source.read(shards, rows, 0), source.read(shards, rows, 1)
    assert (whole["digest"] != other_epoch["digest"]).all()
    assert (source.read(shards, rows, 0)["digest"] == whole["digest"]).all()
    for part in np.array_split(np.random.default_rng(0).permutation(len(shards)), 4):
        batch = source.read(shards[part], rows[part], 0)
        for name, value in batch.items():
            np.testing.assert_array_equal(value, whole[name][part])
    seeded = SpanSource(manifest=manifest, spans=SPANS, special_tokens=SPECIAL, seed=6).read(shards, rows, 0)
    assert (whole["digest"] != seeded["digest"]).all()


def test_masking_follows_its_shares_and_spares_special_tokens(manifest: Manifest) -> None:
    plain = SpanSource(manifest=manifest, spans=SPANS, special_tokens=SPECIAL, seed=5, mask_share=0.0)
    masking = SpanSource(manifest=manifest, spans=SPANS, special_tokens=SPECIAL, seed=5, mask_share=0.15)
    shards, rows = every(manifest)
    num_tokens = num_chosen = num_mask = num_kept = 0
    for epoch in range(40):
        before, after = (source.read(shards, rows, epoch) for source in (plain, masking))
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
    with pytest.raises(
        ValueError, match="holds documents of 30 tokens or more, but the spans need 40: prepare it again"
    ):
        SpanSource(
            manifest=manifest,
            spans=SpanConfig(num_anchors=2, min_length=4, max_length=10),
            special_tokens=SPECIAL,
        )


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
