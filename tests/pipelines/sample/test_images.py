from __future__ import annotations

import io
import json
import math
import random
import re
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import webdataset
from PIL import Image
from transformers import AutoTokenizer

from pipelines.sample.images import TEMPLATES, read_captions, write_images
from pipelines.sample.scenes import (
    COLOURS,
    CONCEPTS,
    SHAPES,
    draw_concepts,
    zipf_probabilities,
)
from pipelines.text.tokenization import train_wordpiece

NUM_IMAGES = 1_150


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sample") / "images"
    write(directory, num_processes=2)
    return directory


def write(directory: Path, *, num_processes: int, seed: int = 0) -> None:
    write_images(
        directory,
        num_images=NUM_IMAGES,
        num_retrieval_images=40,
        num_classes=6,
        num_images_per_class=3,
        image_size=32,
        seed=seed,
        num_processes=num_processes,
    )


def records(directory: Path) -> list[dict[str, Any]]:
    """Return the JSON record of every pair, read by webdataset."""
    shards = [str(path) for path in sorted(directory.glob("*.tar"))]
    return [json.loads(sample["json"]) for sample in webdataset.WebDataset(shards, shardshuffle=False)]


def digests(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_any_number_of_processes_writes_the_same_bytes(data: Path, tmp_path: Path) -> None:
    write(tmp_path / "one", num_processes=1)
    write(tmp_path / "other", num_processes=2, seed=1)
    assert digests(tmp_path / "one") == digests(data)
    other = digests(tmp_path / "other")
    assert sorted(other) == sorted(digests(data))
    assert all(other[name] != content for name, content in digests(data).items() if not name.endswith(".txt"))


def test_the_layout_is_that_of_img2dataset(data: Path) -> None:
    assert sorted(path.name for path in (data / "train").iterdir()) == ["00000.tar", "00001.tar"]
    shards = [str(path) for path in sorted((data / "train").iterdir())]
    samples = list(webdataset.WebDataset(shards, shardshuffle=False))
    keys = [sample["__key__"] for sample in samples]
    assert len(set(keys)) == NUM_IMAGES
    assert keys == sorted(keys)
    assert all(re.fullmatch(r"\d{9}", key) for key in keys)
    assert [int(key) // 10_000 for key in keys] == [0] * 1000 + [1] * 150
    assert int(keys[999]) > 999, "keys have gaps"
    for sample in samples[::50]:
        record = json.loads(sample["json"])
        assert (record["key"], record["caption"], record["status"]) == (
            sample["__key__"],
            sample["txt"].decode(),
            "success",
        )
        image = Image.open(io.BytesIO(sample["jpg"]))
        assert (image.format, image.mode, image.size) == ("JPEG", "RGB", (record["width"], record["height"]))
        assert image.size == (32, 32)
    assert list(read_captions(data / "train")) == [sample["txt"].decode() for sample in samples]


def test_retrieval_splits_have_five_captions_an_image(data: Path) -> None:
    found = {split: records(data / split) for split in ("train", "validation", "test")}
    for split in ("validation", "test"):
        assert len(found[split]) == 40
        for record in found[split]:
            assert len(set(record["captions"])) == len(record["captions"]) == 5
            assert record["captions"][0] == record["caption"]
        assert list(read_captions(data / split)) == [record["caption"] for record in found[split]]
    scenes = [json.dumps(record["scene"]) for split in found.values() for record in split]
    assert len(set(scenes)) == len(scenes), "the splits share no scene"


def test_frequencies_are_the_true_counts_of_the_training_split(data: Path) -> None:
    train = records(data / "train")
    counts = Counter(record["concept"] for record in train)
    table = json.loads((data / "concepts.json").read_text())["concepts"]
    assert [row["concept"] for row in table] == [concept.name for concept in CONCEPTS]
    assert [row["concept_rank"] for row in table] == list(range(1, 201))
    for split in ("train", "validation", "test"):
        rows = records(data / split)
        drawn = Counter(record["concept"] for record in rows)
        assert {row["concept"]: row["frequency"][split] for row in table if row["frequency"][split]} == drawn
        for record in rows:
            assert record["concept_frequency"] == counts[record["concept"]]
            assert record["concept_share"] == pytest.approx(counts[record["concept"]] / NUM_IMAGES)
            assert table[record["concept_rank"] - 1]["concept"] == record["concept"]
            main = record["scene"]["groups"][0]
            assert record["concept"] == f"{main['colour']} {main['shape']}"


def test_concepts_follow_the_zipf_law() -> None:
    assert len({concept.name for concept in CONCEPTS}) == len(CONCEPTS) == len(SHAPES) * len(COLOURS) == 200
    harmonic = math.fsum(1 / rank for rank in range(1, 201))
    expected = [1 / (rank * harmonic) for rank in range(1, 201)]
    assert zipf_probabilities(1.0) == pytest.approx(expected)
    number = 20_000
    counts = Counter(draw_concepts(number, 1.0, random.Random(5)))
    # Pearson's statistic has a mean of 199 and a standard deviation of 20 under the law.
    statistic = sum((counts[rank] - number * p) ** 2 / (number * p) for rank, p in enumerate(expected))
    assert statistic < 199 + 5 * math.sqrt(2 * 199)
    statistic = sum((counts[rank] - number / 200) ** 2 / (number / 200) for rank in range(200))
    assert statistic > 10_000, "the test tells the law from an even one"


def test_zero_shot_classes_are_the_most_frequent_concepts(data: Path) -> None:
    with tarfile.open(data / "zero_shot" / "test.tar") as archive:
        names = archive.getnames()
        assert names == [f"{concept.name}/{number:04d}.jpg" for concept in CONCEPTS[:6] for number in range(3)]
        images = [archive.extractfile(name).read() for name in names]  # type: ignore[union-attr]
    assert len(set(images)) == len(images)
    assert all(Image.open(io.BytesIO(image)).size == (32, 32) for image in images)
    assert (data / "zero_shot" / "templates.txt").read_text().splitlines() == list(TEMPLATES)
    words = {word for text in read_captions(data / "train") for word in text.split()}
    assert {word for template in TEMPLATES for word in template.split()} - {"{}"} <= words, (
        "prompts speak as captions do"
    )


def test_what_is_there_is_not_overwritten(data: Path) -> None:
    before = digests(data)
    with pytest.raises(FileExistsError, match="not empty"):
        write(data, num_processes=1)
    assert digests(data) == before


# ---- the tokenizer of the captions -----------------------------------------------------------------------------------


def test_the_tokenizer_knows_every_caption(data: Path, tmp_path: Path) -> None:
    texts = list(read_captions(data / "train"))
    train_wordpiece(texts, 1024).save_pretrained(tmp_path / "tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    validation = [text for record in records(data / "validation") for text in record["captions"]]
    for text in [*texts, *validation, *(template.format("red circle") for template in TEMPLATES)]:
        ids = tokenizer(text)["input_ids"]
        assert ids[0] == tokenizer.cls_token_id
        assert ids[-1] == tokenizer.sep_token_id
        assert tokenizer.unk_token_id not in ids, text
        assert re.sub(r"\W", "", tokenizer.decode(ids, skip_special_tokens=True)) == re.sub(r"\W", "", text)
    for word in ("random", "Zeppelin", "4711"):
        ids = tokenizer(word)["input_ids"]
        assert tokenizer.unk_token_id not in ids
        assert tokenizer.decode(ids, skip_special_tokens=True) == word.lower()
    batch = tokenizer(texts[:9], padding="max_length", truncation=True, max_length=30, return_tensors="np")
    assert sorted(batch) == ["attention_mask", "input_ids"]
    assert batch["input_ids"].shape == (9, 30)
    assert {tokenizer.mask_token, tokenizer.pad_token} == {"[MASK]", "[PAD]"}
    assert train_wordpiece(texts, 1024).get_vocab() == tokenizer.get_vocab()
    small = train_wordpiece(texts, 150)
    assert len(small) == 150
    assert small.tokenize("a random circle") != tokenizer.tokenize("a random circle")
    assert not any(small.unk_token_id in small(text)["input_ids"] for text in texts)
