"""The text of tokens cut into pieces, with tokenizers of four kinds that are trained here."""

from __future__ import annotations

import itertools
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from pipelines.text.tokenization import load_tokenizer, token_pieces, tokenizer_digest, train_bpe, train_wordpiece

KINDS = ["byte BPE", "SentencePiece BPE", "Unigram", "WordPiece"]
CORPUS = ["Once upon a time there was a small girl. “Don't,” she said – ρ is 3 €."] * 3
SPECIAL = ["<unk>", "<s>", "</s>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
SPACES = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]  # LLaMA's


@cache
def tokenizer_of(kind: str) -> PreTrainedTokenizerFast:
    if kind == "byte BPE":
        return train_bpe(CORPUS, 300)
    if kind == "WordPiece":
        return train_wordpiece(CORPUS, 200)
    trainer: trainers.Trainer
    if kind == "Unigram":
        tokenizer = Tokenizer(models.Unigram())
        trainer = trainers.UnigramTrainer(vocab_size=90, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False)
    else:
        tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
        trainer = trainers.BpeTrainer(vocab_size=330, special_tokens=[*SPECIAL, *BYTES], show_progress=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace() if kind == "Unigram" else decoders.Sequence(SPACES)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def cut_by_offsets(tokenizer: PreTrainedTokenizerFast, text: str) -> list[str]:
    """Cut a text where its tokens end in it; a character of several tokens belongs to the last one."""
    offsets = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).offsets
    starts = [start for start, _ in offsets[1:]] + [len(text)]
    ends = [0, *(min(end, start) for (_, end), start in zip(offsets, starts, strict=True))]
    return [text[before:end] for before, end in itertools.pairwise(ends)]


def rejoined(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> str:
    pieces = token_pieces(tokenizer, ids)
    assert len(pieces) == len(ids)
    return "".join(pieces)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_pieces_of_any_tokens_join_to_their_text(kind: str, data: st.DataObject) -> None:
    tokenizer = tokenizer_of(kind)
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=150))
    assert rejoined(tokenizer, ids) == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", KINDS[:3])
@given(words=st.lists(st.sampled_from(["once", "upon", "a", "girl.", "Don't,", "ρ", "–", "€", "“said”"]), min_size=1))
def test_each_piece_is_what_its_token_was_made_of(kind: str, words: list[str]) -> None:
    tokenizer, text = tokenizer_of(kind), " ".join(words * 8)
    pieces = token_pieces(tokenizer, tokenizer.encode(text, add_special_tokens=False))
    assert pieces == cut_by_offsets(tokenizer, text)


def test_a_character_of_several_tokens_is_whole_and_last() -> None:
    for kind in KINDS[:2]:
        tokenizer = tokenizer_of(kind)
        pieces = token_pieces(tokenizer, tokenizer.encode("a 😀 a", add_special_tokens=False))
        assert "".join(pieces) == "a 😀 a"
        assert [piece for piece in pieces if piece][-2:] == ["😀", " a"]
        assert pieces[pieces.index("😀") - 3 : pieces.index("😀")] == ["", "", ""]
    # Bytes that make no character, and a word's end that alone would keep its mark.
    assert rejoined(tokenizer_of("byte BPE"), [200, 201]) == tokenizer_of("byte BPE").decode([200, 201])
    wordpiece = tokenizer_of("WordPiece")
    assert token_pieces(wordpiece, wordpiece.encode("it said", add_special_tokens=False)) == ["i", "t", " said"]


def test_texts_are_whole_although_the_tokenizer_was_saved_to_cut_and_pad_them(tmp_path: Path) -> None:
    tokenizer = train_wordpiece(CORPUS, 200)
    tokenizer.save_pretrained(tmp_path / "whole")
    tokenizer.backend_tokenizer.enable_truncation(4)
    tokenizer.backend_tokenizer.enable_padding(length=6)
    tokenizer.save_pretrained(tmp_path / "cutting")
    whole, cutting = (load_tokenizer(str(tmp_path / name), needs_eos=False) for name in ("whole", "cutting"))
    encodings = cutting.backend_tokenizer.encode_batch_fast(["a girl was there", "a"], add_special_tokens=False)
    expected = whole(["a girl was there", "a"], add_special_tokens=False)["input_ids"]
    assert [encoding.ids for encoding in encodings] == expected
    assert tokenizer_digest(cutting) == tokenizer_digest(whole)
