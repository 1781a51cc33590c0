"""The sample images: scenes are drawn and captioned truly, in img2dataset's layout, for any number of processes."""

from __future__ import annotations

import io
import itertools
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
    COLOUR_JITTER,
    COLOURS,
    CONCEPTS,
    MAX_FIGURES,
    PALETTE,
    RADII,
    SHAPE_NOUNS,
    SHAPES,
    Scene,
    draw_concepts,
    draw_scene,
    generate_captions,
    measure_gap,
    pluralize,
    render,
    zipf_probabilities,
)

# ---- scenes and their captions ---------------------------------------------------------------------------------------


def draw_scenes(number: int) -> list[Scene]:
    generator = random.Random(11)
    return [draw_scene(generator.choice(CONCEPTS), generator) for _ in range(number)]


def test_scenes_are_separate_figures_of_the_stated_size_and_the_main_group_is_the_most_to_be_seen() -> None:
    totals = []
    for scene in draw_scenes(200):
        figures = [figure for group in scene.groups for figure in group.figures]
        totals.append(len(figures))
        assert 1 <= len(figures) <= MAX_FIGURES
        assert len({(group.shape, group.colour) for group in scene.groups}) == len(scene.groups)
        assert all(measure_gap(one, other) > 0 for one, other in itertools.combinations(figures, 2))
        for group in scene.groups:
            assert 1 <= len(group.figures) <= 3
            for figure in group.figures:
                assert RADII[group.size][0] <= figure.radius <= RADII[group.size][1]
                assert figure.radius < figure.x < 1 - figure.radius
                assert figure.radius < figure.y < 1 - figure.radius
        areas = [sum(figure.radius**2 for figure in group.figures) for group in scene.groups]
        assert all(areas[0] > area for area in areas[1:])
    assert sum(total >= 2 for total in totals) > 190


def test_figures_are_drawn_where_and_in_the_colour_that_the_scene_says() -> None:
    """The centre of a shape without a hole or pattern has the palette's colour."""
    tolerance, image_size, num_checked = COLOUR_JITTER + 0.04 * 255 + 1, 48, 0
    generator = random.Random(3)
    for scene in draw_scenes(150):
        image = render(scene, image_size, generator)
        for group in scene.groups:
            if group.shape in ("ring", "crescent", "flower") or group.pattern != "plain":
                continue
            for figure in group.figures:
                pixel: Any = image.getpixel((int(figure.x * image_size), int(figure.y * image_size)))
                differences = [abs(a - b) for a, b in zip(pixel, PALETTE[group.colour], strict=True)]
                assert max(differences) <= tolerance, (group, figure, pixel)
                num_checked += 1
    assert num_checked > 150


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
    number = 20_000
    counts = Counter(draw_concepts(number, 1.0, random.Random(5)))
    # Pearson's statistic has a mean of 199 and a standard deviation of 20 under the law.
    statistic = sum((counts[rank] - number * p) ** 2 / (number * p) for rank, p in enumerate(expected))
    assert statistic < 199 + 5 * math.sqrt(2 * 199)


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
