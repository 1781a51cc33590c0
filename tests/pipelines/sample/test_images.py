"""The sample images: scenes are drawn and captioned truly, in img2dataset's layout, for any number of processes."""

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

from pipelines.sample import images
from pipelines.sample.images import TEMPLATES, read_captions, write_images
from pipelines.sample.scenes import (
    COLOUR_ADJECTIVES,
    COLOURS,
    CONCEPTS,
    SHAPE_NOUNS,
    SHAPES,
    Scene,
    draw_scene,
    generate_captions,
    pluralize,
    zipf_probabilities,
)

# ---- scenes and their captions ---------------------------------------------------------------------------------------


def draw_scenes(number: int) -> list[Scene]:
    generator = random.Random(11)
    return [draw_scene(generator.choice(CONCEPTS), generator) for _ in range(number)]


def test_captions_name_the_main_group_and_those_of_a_scene_differ() -> None:
    generator = random.Random(7)
    for scene in draw_scenes(100):
        main = scene.groups[0]
        nouns = [form for noun in SHAPE_NOUNS[main.shape] for form in (noun, pluralize(noun))]
        phrases = [f"{colour} {noun}" for colour in COLOUR_ADJECTIVES[main.colour] for noun in nouns]
        captions = generate_captions(scene, 5, generator)
        assert len(set(captions)) == 5
        assert all(any(phrase in caption for phrase in phrases) for caption in captions), (scene, captions)


def test_concepts_follow_the_zipf_law() -> None:
    assert len({concept.name for concept in CONCEPTS}) == len(CONCEPTS) == len(SHAPES) * len(COLOURS) == 200
    harmonic = math.fsum(1 / rank for rank in range(1, 201))
    expected = [1 / (rank * harmonic) for rank in range(1, 201)]
    assert zipf_probabilities(1.0) == pytest.approx(expected)


# ---- the data set ----------------------------------------------------------------------------------------------------

NUM_IMAGES = 230


def write(directory: Path, *, num_processes: int, seed: int = 0) -> None:
    sizes = {"num_retrieval_images": 30, "num_classes": 6, "num_images_per_class": 3, "image_size": 32}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(images, "NUM_PAIRS_PER_SHARD", 200)
        write_images(directory, num_images=NUM_IMAGES, seed=seed, num_processes=num_processes, **sizes)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sample") / "images"
    write(directory, num_processes=2)
    return directory


def read_samples(directory: Path) -> list[dict[str, Any]]:
    shards = [str(path) for path in sorted(directory.glob("*.tar"))]
    return list(webdataset.WebDataset(shards, shardshuffle=False))


def records(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(sample["json"]) for sample in read_samples(directory)]


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_any_number_of_processes_writes_the_same_bytes(data: Path, tmp_path: Path) -> None:
    write(tmp_path / "one", num_processes=1)
    write(tmp_path / "other", num_processes=1, seed=1)
    with pytest.raises(FileExistsError, match="not empty"):
        write(data, num_processes=1)
    assert contents(tmp_path / "one") == contents(data)
    other = contents(tmp_path / "other")
    assert sorted(other) == sorted(contents(data))
    assert all(other[name] != content for name, content in contents(data).items() if not name.endswith(".txt"))


def test_the_layout_is_that_of_img2dataset_with_five_captions_for_retrieval(data: Path) -> None:
    assert sorted(path.name for path in (data / "train").iterdir()) == ["00000.tar", "00001.tar"]
    keys = [sample["__key__"] for sample in read_samples(data / "train")]
    assert sorted(set(keys)) == keys
    assert all(re.fullmatch(r"\d{9}", key) for key in keys)
    assert [int(key) // 10_000 for key in keys] == [0] * 200 + [1] * 30
    assert int(keys[199]) > 199, "keys have gaps"
    scenes = []
    for split, num_images, num_captions in (("train", NUM_IMAGES, 1), ("validation", 30, 5), ("test", 30, 5)):
        samples = read_samples(data / split)
        assert len(samples) == num_images
        assert list(read_captions(data / split)) == [sample["txt"].decode() for sample in samples]
        for sample in samples:
            record = json.loads(sample["json"])
            scenes.append(json.dumps(record["scene"]))
            found = record["key"], record["caption"], record["status"]
            assert found == (sample["__key__"], sample["txt"].decode(), "success")
            captions = record.get("captions", [record["caption"]])
            assert captions[0] == record["caption"]
            assert len(set(captions)) == len(captions) == num_captions
        image = Image.open(io.BytesIO(sample["jpg"]))
        assert (image.format, image.mode, image.size) == ("JPEG", "RGB", (32, 32))
    assert len(set(scenes)) == len(scenes), "the splits share no scene"


def test_frequencies_are_the_true_counts_of_the_training_split(data: Path) -> None:
    counts = Counter(record["concept"] for record in records(data / "train"))
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


def test_zero_shot_classes_are_the_most_frequent_concepts(data: Path) -> None:
    with tarfile.open(data / "zero_shot" / "test.tar") as archive:
        names = archive.getnames()
        assert names == [f"{concept.name}/{number:04d}.jpg" for concept in CONCEPTS[:6] for number in range(3)]
        assert len({archive.extractfile(name).read() for name in names}) == len(names)  # type: ignore[union-attr]
    assert (data / "zero_shot" / "templates.txt").read_text().splitlines() == list(TEMPLATES)
