"""Captions and labels: what JSON files say of images, tokens as the tokenizer gives them, and the paper's noise."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from image_archive_support import jpeg, read
from text_archive_support import tar
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from pipelines.images.archives import ImageSample, list_image_archives, read_samples
from pipelines.images.captions import RANDOM_WORD, CaptionEncoder, CaptionFile, CaptionNoise
from pipelines.images.temperature_table import read_numbers
from pipelines.problems import Problem
from pipelines.text.tokenization import train_bpe


def captions(tmp_path: Path, content: object, *splits: str) -> CaptionFile:
    path = tmp_path / "captions.json"  # what was written again is read again
    path.write_text(json.dumps(content))
    return CaptionFile.load(str(path), splits)


def karpathy(*images: tuple[str, str, str, list[str]]) -> dict[str, object]:
    listed = []
    for directory, name, split, texts in images:
        sentences = [{"raw": text} for text in texts]
        listed.append({"filepath": directory, "filename": name, "split": split, "sentences": sentences})
    return {"images": listed}


def test_both_forms_of_captions_are_read_and_a_split_is_selected(tmp_path: Path) -> None:
    images = [("val", "1.jpg", "test", ["a", "b"]), ("val", "2.jpg", "val", ["c"]), ("", "3.jpg", "test", ["d"])]
    content = karpathy(*images)
    everything = {"val/1.jpg": ("a", "b"), "val/2.jpg": ("c",), "3.jpg": ("d",)}
    for splits in ((), ("",), ("val", "test")):
        assert captions(tmp_path, content, *splits).captions == everything
    assert captions(tmp_path, content, "test").captions == {"val/1.jpg": ("a", "b"), "3.jpg": ("d",)}
    with pytest.raises(ValueError, match=r"'training' is not in .* it has test, val"):
        captions(tmp_path, content, "test", "training")
    listed = [
        {"image": "1.jpg", "caption": "a"},
        {"image": "2.jpg", "caption": ["b"]},
        {"image": "1.jpg", "caption": "d"},
    ]
    assert captions(tmp_path, listed).captions == {"1.jpg": ("a", "d"), "2.jpg": ("b",)}
    with pytest.raises(ValueError, match="leave it empty"):
        captions(tmp_path, listed, "test")
    # A record, or a caption, that is no text costs itself.
    found = captions(
        tmp_path, [*listed, {"image": None, "caption": "x"}, None, {"image": "4.jpg", "caption": ["e", None, 1]}]
    )
    assert found.captions == {"1.jpg": ("a", "d"), "2.jpg": ("b",), "4.jpg": ("e",)}
    assert [where for where, _ in found.invalid] == ["record 3", "record 4", "4.jpg", "4.jpg"]
    assert found.invalid[2][1] == "one of the captions is null, not text"
    for bad in ({"annotations": []}, [["1.jpg", "a"]], "text", []):
        with pytest.raises(ValueError, match=r"captions\.json"):
            captions(tmp_path, bad)


def test_an_image_is_found_by_either_paths_ending(tmp_path: Path) -> None:
    file = captions(
        tmp_path, [{"image": name, "caption": "c"} for name in ("val/1.jpg", "a/2.jpg", "b/2.jpg", "3.jpg")]
    )
    found = {path: file.find(path) for path in ("coco/val/1.jpg", "1.jpg", "x/b/2.jpg", "deep/er/3.jpg")}
    assert list(found.values()) == ["val/1.jpg", "val/1.jpg", "b/2.jpg", "3.jpg"]
    assert not any(map(file.find, ("train/1.jpg", "2.jpg", "13.jpg")))


def test_only_named_images_of_a_tar_or_a_directory_are_read_and_one_that_is_gone_costs_itself(tmp_path: Path) -> None:
    file = captions(tmp_path, karpathy(*(("", f"{n}.jpg", "test", [f"caption {n}", "again"]) for n in (1, 3, 4))))
    members = [(f"images/{n}.jpg", jpeg(n)) for n in range(5)]
    assert len(read(tmp_path / "a.tar", tar(members))[1]) == 5
    found, problems = read(tmp_path / "a.tar", tar(members[:4]), file)
    assert not problems
    assert [sample.key for sample in found] == ["1.jpg", "3.jpg"]
    root = tmp_path / "files"
    (root / "images").mkdir(parents=True)
    for name, data in members:
        (root / name).write_bytes(data)
    (archive,) = list_image_archives(str(root))
    (root / "images" / "4.jpg").unlink()
    *items, gone = read_samples(str(root), archive, file)
    assert isinstance(gone, Problem)
    assert gone.kind == "unreadable_file"
    of_files = [item for item in items if isinstance(item, ImageSample)]
    assert len(items) - len(of_files) == 2
    for sample, other in zip(found, of_files, strict=True):
        assert (sample.key, sample.data, sample.captions) == (other.key, other.data, other.captions)
        assert other.offset == 0
        assert (root / other.member).read_bytes() == other.data


# ---- numbers in the JSON files beside images ---------------------------------------------------------------------------


def test_finite_numbers_are_read_and_everything_else_is_left_out(tmp_path: Path) -> None:
    records = {
        "a": {"n": 3}, "b/c.v1": {"n": 0.5}, "text": {"n": "3"}, "true": {"n": True}, "none": {"m": 1}, "list": [1],
        "nan": {"n": float("nan")}, "huge": {"n": 10**400},
    }  # fmt: skip
    files = {f"{key}.json": json.dumps(record).encode() for key, record in records.items()}
    # The first archive has no field, but an image of another key, and the last is cut within its first member.
    archives = [
        {"a.json": b'{"m": 3}', "b/c.v1.jpg": b"image"},
        files | {"broken.json": b"{", "a.jpg": b"no image"},
        {"d.JSON": b'{"n": -1}'},
    ]
    for number, members in enumerate(archives):
        (tmp_path / f"{number}.tar").write_bytes(tar(members.items()))
    (tmp_path / "3.tar").write_bytes(tar(archives[2].items())[:520])
    numbers = read_numbers(str(tmp_path), list_image_archives(str(tmp_path)), "n")
    assert dict(numbers) == {"a": 3.0, "1.tar/a": 3.0, "1.tar/b/c.v1": 0.5, "d": -1.0, "2.tar/d": -1.0}


def test_a_field_that_no_sample_has_is_refused_with_those_that_there_are(tmp_path: Path) -> None:
    (tmp_path / "0.tar").write_bytes(tar([("a.json", b'{"width": 3, "similarity": 0.5, "caption": "x"}')]))
    with pytest.raises(ValueError, match=r"label = size: no \.json in .* fields with numbers are similarity, width"):
        next(read_numbers(str(tmp_path), list_image_archives(str(tmp_path)), "size"))


# ---- tokens ----------------------------------------------------------------------------------------------------------

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


@pytest.mark.parametrize("num_text_tokens", [3, 5, 42, 43])
def test_tokens_are_those_of_the_tokenizer_cut_and_padded(num_text_tokens: int) -> None:
    tokenizer = bert_like()
    encoder = CaptionEncoder(tokenizer=tokenizer, num_text_tokens=num_text_tokens)
    encoded = encoder.encode(TEXTS)
    expected = tokenizer(TEXTS, padding="max_length", truncation=True, max_length=num_text_tokens, return_tensors="np")
    for name in ("input_ids", "attention_mask"):
        assert np.array_equal(encoded[name], expected[name])
        assert encoded[name].dtype == np.int64
        assert encoded[name].shape == (4, num_text_tokens)
    assert tokenizer("w1 " * 100)["input_ids"] == [2, *[5] * 100, 3]  # its own state is as it was
    assert encoder.are_cut(TEXTS).tolist() == [len(row) > num_text_tokens for row in tokenizer(TEXTS)["input_ids"]]


def test_a_tokenizer_without_padding_pads_under_the_mask() -> None:
    tokenizer = train_bpe(["a dog runs"] * 5, 270)
    assert tokenizer.pad_token_id is None
    encoded = CaptionEncoder(tokenizer=tokenizer).encode(["a dog"])
    num_tokens = len(tokenizer("a dog")["input_ids"])
    assert encoded["attention_mask"][0].tolist() == [1] * num_tokens + [0] * (30 - num_tokens)
    assert encoded["input_ids"].max() < len(tokenizer)
    assert CaptionEncoder(tokenizer=tokenizer).encode([])["input_ids"].shape == (0, 30)


# ---- noise -----------------------------------------------------------------------------------------------------------


def one_word_deleted(words: list[str], noised: list[str]) -> bool:
    return any(words[:at] + words[at + 1 :] == noised for at in range(len(words)))


def one_word_replaced(words: list[str], noised: list[str]) -> bool:
    return any([*words[:at], RANDOM_WORD, *words[at + 1 :]] == noised for at in range(len(words)))


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
