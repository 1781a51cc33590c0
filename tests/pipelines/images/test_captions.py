"""Tests of pipelines.images.captions: tokens as the tokenizer itself gives them, and noise as the paper defines it."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from pipelines.images.captions import RANDOM_WORD, CaptionEncoder, CaptionNoise
from pipelines.text.tokenization import load_tokenizer, train_bpe

WORDS = [f"w{number}" for number in range(40)]


def bert_like() -> PreTrainedTokenizerFast:
    """Create a tokenizer of words that puts [CLS] and [SEP] around them."""
    vocabulary = {token: number for number, token in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    )


TEXTS = ["w1 w2 w3", " ".join(WORDS), "", "w5 unknown"]


@pytest.mark.parametrize("num_text_tokens", [3, 30, 64])
def test_tokens_are_those_of_the_tokenizer_cut_and_padded(num_text_tokens: int) -> None:
    tokenizer = bert_like()
    encoded = CaptionEncoder(tokenizer=tokenizer, num_text_tokens=num_text_tokens).encode(TEXTS)
    expected = tokenizer(TEXTS, padding="max_length", truncation=True, max_length=num_text_tokens, return_tensors="np")
    for name in ("input_ids", "attention_mask"):
        assert np.array_equal(encoded[name], expected[name])
        assert encoded[name].dtype == np.int64
        assert encoded[name].shape == (4, num_text_tokens)
    ends = encoded["input_ids"][np.arange(4), encoded["attention_mask"].sum(axis=1) - 1]
    assert (ends == tokenizer.sep_token_id).all()
    assert tokenizer("w1 " * 100)["input_ids"] == [2, *[5] * 100, 3]  # its own state is as it was


@pytest.mark.parametrize("num_text_tokens", [3, 4, 5, 42, 43])
def test_captions_that_lose_tokens_are_told(num_text_tokens: int) -> None:
    tokenizer = bert_like()
    are_cut = CaptionEncoder(tokenizer=tokenizer, num_text_tokens=num_text_tokens).are_cut(TEXTS)
    assert are_cut.tolist() == [len(row) > num_text_tokens for row in tokenizer(TEXTS)["input_ids"]]


def test_a_tokenizer_without_padding_pads_under_the_mask() -> None:
    tokenizer = train_bpe(["a dog runs"] * 5, 270)
    assert tokenizer.pad_token_id is None
    encoded = CaptionEncoder(tokenizer=tokenizer).encode(["a dog"])
    num_tokens = len(tokenizer("a dog")["input_ids"])
    assert encoded["attention_mask"][0].tolist() == [1] * num_tokens + [0] * (30 - num_tokens)
    assert encoded["input_ids"].max() < len(tokenizer)
    assert CaptionEncoder(tokenizer=tokenizer).encode([])["input_ids"].shape == (0, 30)


def test_a_tokenizer_without_an_end_of_text_is_loaded_for_captions_only(tmp_path: Path) -> None:
    bert_like().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no end-of-text token"):
        load_tokenizer(str(tmp_path))
    encoder = CaptionEncoder(tokenizer=load_tokenizer(str(tmp_path), needs_eos=False), num_text_tokens=6)
    assert encoder.encode(["w1 w2"])["input_ids"].tolist() == [[2, 5, 6, 3, 0, 0]]


def test_too_few_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match=r"num_text_tokens = 2 must exceed the 2 special tokens"):
        CaptionEncoder(tokenizer=bert_like(), num_text_tokens=2)


# ---- noise -----------------------------------------------------------------------------------------------------------


def one_word_deleted(words: list[str], noised: list[str]) -> bool:
    return any(words[:at] + words[at + 1 :] == noised for at in range(len(words)))


def one_word_replaced(words: list[str], noised: list[str]) -> bool:
    return any([*words[:at], RANDOM_WORD, *words[at + 1 :]] == noised for at in range(len(words)))


@settings(max_examples=200)
@given(
    st.lists(st.sampled_from(WORDS), min_size=1, max_size=12),
    st.integers(0, 2**31),
    st.integers(0, 2**40),
    st.floats(0, 1),
)
def test_noise_is_one_word_deleted_or_replaced_and_a_function_of_seed_and_pair(
    words: list[str], seed: int, pair: int, share: float
) -> None:
    caption = "  ".join(words)
    noised, is_noisy = CaptionNoise(share=share, seed=seed).apply(caption, pair)
    assert CaptionNoise(share=share, seed=seed).apply(caption, pair) == (noised, is_noisy)
    if not is_noisy:
        assert noised == caption
    elif len(words) == 1:
        assert noised == RANDOM_WORD
    else:
        assert one_word_deleted(words, noised.split()) != one_word_replaced(words, noised.split())
        # And what is chosen at a share is chosen, and changed in the same way, at a larger one.
        assert CaptionNoise(share=1.0, seed=seed).apply(caption, pair) == (noised, True)


@pytest.mark.parametrize("share", [0.05, 0.15, 0.5])
def test_the_share_and_its_halves_lie_within_binomial_bounds(share: float) -> None:
    num_pairs, caption = 4000, "w1 w2 w3 w4"
    results = [CaptionNoise(share=share, seed=7).apply(caption, pair) for pair in range(num_pairs)]
    noisy = [text.split() for text, is_noisy in results if is_noisy]
    assert abs(len(noisy) - share * num_pairs) < 4 * math.sqrt(num_pairs * share * (1 - share))
    num_deleted = sum(len(words) == 3 for words in noisy)
    assert abs(num_deleted - len(noisy) / 2) < 4 * math.sqrt(len(noisy) / 4)
    replaced = [words.index(RANDOM_WORD) for words in noisy if len(words) == 4]
    assert set(replaced) == {0, 1, 2, 3}
    other = [CaptionNoise(share=share, seed=8).apply(caption, pair)[1] for pair in range(num_pairs)]
    assert other != [is_noisy for _, is_noisy in results]


def test_without_noise_nothing_changes_and_a_share_beyond_1_is_refused() -> None:
    assert CaptionNoise().apply(" as  it is\t", 3) == (" as  it is\t", False)
    with pytest.raises(ValueError, match=r"caption_noise = 1\.5 must lie in \[0, 1\]"):
        CaptionNoise(share=1.5)
