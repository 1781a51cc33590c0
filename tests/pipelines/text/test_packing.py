"""Rows of a prepared text: packing loses nothing and adds nothing, and keys depend on a row's own place alone."""

from __future__ import annotations

from dataclasses import asdict, replace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.text.manifest import ArchiveEntry, Manifest, ShardEntry
from pipelines.text.packing import IGNORE_INDEX, PackingConfig
from pipelines.text.windows import WindowConfig

BOS, EOS = 0, 1
documents_strategy = st.lists(
    st.lists(st.integers(2, 90), max_size=25).map(lambda ids: np.array(ids, dtype=np.int64)), min_size=1, max_size=60
)


def config(context_length: int, vocab_size: int = 100) -> PackingConfig:
    return PackingConfig(context_length=context_length, bos_id=BOS, eos_id=EOS, vocab_size=vocab_size)


@given(documents=documents_strategy, context_length=st.sampled_from([2, 3, 12]), batch=st.integers(1, 7))
def test_blocks_hold_every_document_once_in_order(documents: list[np.ndarray], context_length: int, batch: int) -> None:
    batches = list(config(context_length).rows(documents, num_rows=batch))
    table = pa.Table.from_batches(batches)
    arrays = config(context_length).unpack(table)
    is_target = arrays["targets"] != IGNORE_INDEX
    inputs = np.concatenate([np.r_[BOS, ids] for ids in documents])
    targets = np.concatenate([np.r_[ids, EOS] for ids in documents])
    assert np.array_equal(arrays["input_ids"][is_target], inputs)
    assert np.array_equal(arrays["targets"][is_target], targets)
    # Positions restart with the document and with the block.
    in_document = np.concatenate([np.arange(len(ids) + 1) for ids in documents])
    in_block = np.arange(len(inputs)) % context_length
    assert np.array_equal(arrays["position_ids"][is_target], np.minimum(in_document, in_block))
    # Only the last block is padded, and its padding is a document of its own.
    assert is_target[:-1].all()
    assert is_target[-1].sum() == (len(inputs) - 1) % context_length + 1
    owner = np.repeat(np.arange(len(documents)), [len(ids) + 1 for ids in documents])
    assert table.column("document").to_pylist() == owner[::context_length].tolist()
    assert np.array_equal(arrays["documents"][is_target], owner)
    assert sum(table.column("num_tokens").to_pylist()) == len(inputs)


@given(
    documents=documents_strategy, context_length=st.sampled_from([2, 3, 12]), stride=st.integers(1, 12),
    num_windows=st.integers(0, 2),
)  # fmt: skip
def test_windows_predict_every_token_once_from_its_own_document(
    documents: list[np.ndarray], context_length: int, stride: int, num_windows: int
) -> None:
    stride = min(stride, context_length)
    layout = windows(context_length, stride, num_windows)
    arrays = layout.unpack(pa.Table.from_batches(list(layout.rows(documents))))
    found: dict[tuple[int, int], tuple[list[int], int]] = {}
    for row, column in np.argwhere(arrays["targets"] != IGNORE_INDEX):
        position, document = arrays["position_ids"][row, column], arrays["documents"][row, column]
        read = arrays["input_ids"][row, column - position : column + 1].tolist()
        assert (arrays["documents"][row, column - position : column + 1] == document).all()
        number = sum(key[0] == document for key in found)
        found[document, number] = read, arrays["targets"][row, column]
    expected = {}
    for document, ids in enumerate(documents):
        stream = [BOS, *ids.tolist(), EOS]
        for place in range(len(ids) + 1):
            start = 0 if place < context_length else (place - context_length) // stride * stride + stride
            expected[document, place] = stream[start : place + 1], stream[place + 1]
    assert found == expected
    if num_windows == 1:  # no block holds two documents
        assert (arrays["documents"] == arrays["documents"][:, :1]).all()


def windows(context_length: int, stride: int, num_windows: int = 0) -> WindowConfig:
    return WindowConfig(**asdict(config(context_length)), stride=stride, num_windows=num_windows)


@pytest.mark.parametrize("layout", [config(16), windows(16, 8)])
def test_a_batch_of_blocks_can_be_sliced_and_taken(layout: PackingConfig) -> None:
    rng = np.random.default_rng(0)
    documents = [rng.integers(2, 90, size=size) for size in rng.integers(0, 60, size=200)]
    table = pa.Table.from_batches(list(layout.rows(documents)))
    whole = layout.unpack(table)
    rows = rng.permutation(table.num_rows)[:50]
    for name, value in layout.unpack(table.take(pa.array(rows))).items():
        assert np.array_equal(value, whole[name][rows]), name
    for name, value in layout.unpack(table.slice(7, 20)).items():
        assert np.array_equal(value, whole[name][7:27]), name


def test_large_vocabularies_keep_their_token_ids() -> None:
    ids = np.array([65_535, 65_536, 128_000])
    layout = config(4, vocab_size=128_256)
    arrays = layout.unpack(pa.Table.from_batches(list(layout.rows([ids]))))
    assert arrays["targets"][0].tolist() == [65_535, 65_536, 128_000, EOS]
    assert config(4, vocab_size=65_536).schema.field("tokens").type.value_type == pa.uint16()


def test_a_fifth_of_the_documents_is_held_out_and_the_others_are_the_rest() -> None:
    documents, kept = [np.array([token]) for token in range(2, 500)], []
    for name in ("held_out", "others"):
        layout = replace(config(2, vocab_size=500), documents=name)
        kept.append(set(layout.unpack(pa.Table.from_batches(list(layout.rows(documents))))["targets"][:, 0].tolist()))
    assert sorted([*kept[0], *kept[1]]) == [*range(2, 500)]
    assert 70 < len(kept[0]) < 130
    assert layout.describe(2, 9) == "four fifths in 2 blocks of 2"


def test_no_documents_make_no_blocks() -> None:
    assert list(config(4).rows([])) == []
    with pytest.raises(ValueError, match=r"^context_length = 1 must be at least 2 tokens"):
        config(1)


# ---- keys of rows ----------------------------------------------------------------------------------------------------


def archive(sizes: list[list[int]]) -> ArchiveEntry:
    """Return an archive with the given numbers of rows in the shards of its parts."""
    shards = [
        ShardEntry(file="", archive="", num_rows=size, num_tokens=0, digest="", part=part)
        for part, shards in enumerate(sizes)
        for size in shards
    ]
    return ArchiveEntry(
        path="", num_bytes=0, num_documents=0, problems={}, examples=[], shards=shards, num_parts=len(sizes)
    )


def keys(*archives: ArchiveEntry) -> list[int]:
    manifest = Manifest(directory="", tokenizer_digest="", layout=config(4), archives=list(archives))
    shards = np.repeat(np.arange(len(manifest.shards)), manifest.shard_sizes)
    rows = np.concatenate([np.arange(size) for size in manifest.shard_sizes])
    return manifest.row_keys(shards, rows).tolist()


def test_a_key_depends_on_the_part_and_the_place_in_it_alone() -> None:
    found = keys(archive([[3, 2], [], [4]]), archive([[2, 1, 2]]))
    in_parts = [found[:5], found[5:9], found[9:]]
    for part, number in zip(in_parts, (0, 2, 3), strict=True):
        assert part == [(number << 32) + row for row in range(len(part))]
    # Other rows in other parts change nothing.
    other = keys(archive([[7], [5, 5], [2, 2]]), archive([[5]]))
    assert (other[17:21], other[21:]) == (in_parts[1], in_parts[2])
