"""Tests of labelled sentences as arrays: they hold the tokenizer's own tokens, in the order of the plan, for any rank."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from pipelines.plan import StreamPlan
from pipelines.sentences.classification import LabelledSource
from pipelines.sentences.senteval import Examples
from pipelines.stream import RankStream
from pipelines.text.tokenization import train_wordpiece

FIRST = [f"{'very ' * (number % 5)}good film {number}" for number in range(13)]
SECOND = [f"film {number}" for number in range(13)]
LABELS = np.arange(13) % 3


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_wordpiece(FIRST, 120)


@pytest.mark.parametrize("second", [None, SECOND])
def test_rows_are_the_tokenizers_own(tokenizer: PreTrainedTokenizerFast, second: list[str] | None) -> None:
    source = LabelledSource.of(Examples(FIRST, second, LABELS), tokenizer, num_tokens=64)
    for row, first in enumerate(FIRST):
        expected = tokenizer.encode(first, *([second[row]] if second else []))
        batch = source.read(np.zeros(1, int), np.array([row]), 0)
        assert batch["input_ids"][0, : batch["lengths"][0]].tolist() == expected
        assert set(batch["input_ids"][0, batch["lengths"][0] :]) <= {tokenizer.pad_token_id}
        assert batch["labels"][0] == LABELS[row]
    assert source.num_cut == 0
    assert "token_type_ids" not in batch


def test_long_sentences_are_cut_and_counted(tokenizer: PreTrainedTokenizerFast) -> None:
    source = LabelledSource.of(Examples(FIRST, None, LABELS), tokenizer, num_tokens=6)
    whole = [len(tokenizer.encode(text)) for text in FIRST]
    assert source.num_cut == sum(length > 6 for length in whole) > 0
    assert source.lengths.tolist() == [min(length, 6) for length in whole]


def test_token_types_where_the_model_knows_them(tokenizer: PreTrainedTokenizerFast) -> None:
    names = tokenizer.model_input_names
    try:
        tokenizer.model_input_names = [*names, "token_type_ids"]
        source = LabelledSource.of(Examples(FIRST, SECOND, LABELS), tokenizer, num_tokens=64)
        expected = tokenizer(FIRST[4], SECOND[4])["token_type_ids"]
    finally:
        tokenizer.model_input_names = names
    batch = source[np.arange(4, 6)].read(np.zeros(1, int), np.array([0]), 0)
    assert batch["token_type_ids"][0, : len(expected)].tolist() == expected
    assert sum(expected) > 0


@settings(max_examples=60)
@given(
    world_size=st.sampled_from([1, 2, 4]),
    first=st.integers(0, 5),
    num_batches=st.integers(0, 9),
    window_size=st.integers(1, 20),
)
def test_ranks_read_what_the_plan_says(world_size: int, first: int, num_batches: int, window_size: int) -> None:
    """Batches of 8 cross the ends of epochs of 13 sentences, and may begin anywhere."""
    source = LabelledSource(
        token_ids=np.arange(26, dtype=np.int32).reshape(13, 2),
        token_types=None,
        lengths=np.full(13, 2),
        labels=np.arange(13) % 3,
        num_cut=0,
    )
    plan = StreamPlan(shard_sizes=(6, 0, 7), seed=3, window_size=window_size)

    class Shards:
        """The source, divided into shards of 6, 0 and 7 sentences."""

        def read(self, shards: np.ndarray, rows: np.ndarray, epoch: int) -> dict[str, np.ndarray]:
            return source.read(shards, np.array([0, 6, 6])[shards] + rows, epoch)

        def name(self, shard: int, row: int) -> str:
            return f"{shard}:{row}"

    start, stop = 8 * first, 8 * (first + num_batches)
    expected = []
    for window in plan.windows(start, stop):
        places = np.arange(max(start, window.start), min(stop, window.stop))
        shards, rows = plan.locate(window, places)
        expected += (np.array([0, 6, 6])[shards] + rows).tolist()
    streams = [
        RankStream(source=Shards(), plan=plan, batch_size=8, rank=rank, world_size=world_size, num_readers=0)
        for rank in range(world_size)
    ]
    found = []
    for parts in zip(*(stream.batches(start, stop) for stream in streams), strict=True):
        found += np.concatenate([part["ids"] for part in parts]).tolist()
        assert [len(part["ids"]) for part in parts] == [8 // world_size] * world_size
    assert found == expected
