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
from transformers import AutoTokenizer

from pipelines.sample.drawing import COLOUR_JITTER, PALETTE, render
from pipelines.sample.images import TEMPLATES, read_captions, write_images
from pipelines.sample.scene_captions import (
    BACKGROUND_ADJECTIVES,
    COLOUR_ADJECTIVES,
    COUNT_WORDS,
    PATTERN_ADJECTIVES,
    PLACES,
    RELATIONS,
    SHAPE_NOUNS,
    SIZE_ADJECTIVES,
    TEXTURE_ADJECTIVES,
    generate_caption,
    generate_captions,
    pluralize,
)
from pipelines.sample.scenes import (
    COLOURS,
    CONCEPTS,
    MAX_FIGURES,
    RADII,
    SHAPES,
    Scene,
    draw_concepts,
    draw_scene,
    measure_gap,
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


# ---- scenes ----------------------------------------------------------------------------------------------------------


def scenes(number: int) -> list[Scene]:
    generator = random.Random(11)
    return [draw_scene(generator.choice(CONCEPTS), generator) for _ in range(number)]


def test_scenes_are_made_of_separate_figures_of_the_stated_size() -> None:
    for scene in scenes(300):
        figures = [figure for group in scene.groups for figure in group.figures]
        assert 1 <= len(figures) <= MAX_FIGURES
        assert len({(group.shape, group.colour) for group in scene.groups}) == len(scene.groups)
        assert all(measure_gap(one, other) > 0 for one, other in itertools.combinations(figures, 2))
        for group in scene.groups:
            assert 1 <= len(group.figures) <= 3
            for figure in group.figures:
                assert RADII[group.size][0] <= figure.radius <= RADII[group.size][1]
                assert figure.radius < figure.x < 1 - figure.radius
                assert figure.radius < figure.y < 1 - figure.radius
    totals = [sum(len(group.figures) for group in scene.groups) for scene in scenes(300)]
    assert sum(total >= 2 for total in totals) > 290


def test_the_main_group_is_the_most_to_be_seen() -> None:
    def area(scene: Scene, number: int) -> float:
        return sum(figure.radius**2 for figure in scene.groups[number].figures)

    for scene in scenes(300):
        assert all(area(scene, 0) > area(scene, number) for number in range(1, len(scene.groups)))


@pytest.mark.parametrize("image_size", [48, 64])
def test_figures_are_drawn_where_and_in_the_colour_that_the_scene_says(image_size: int) -> None:
    """The centre of a shape without a hole or pattern has the palette's colour."""
    tolerance = COLOUR_JITTER + 0.04 * 255 + 1
    generator = random.Random(3)
    num_checked = 0
    for scene in scenes(150):
        image = render(scene, image_size, generator)
        for group in scene.groups:
            if group.shape in ("ring", "crescent", "flower") or group.pattern != "plain":
                continue
            for figure in group.figures:
                pixel = image.getpixel((int(figure.x * image_size), int(figure.y * image_size)))
                assert isinstance(pixel, tuple)
                differences = [abs(a - b) for a, b in zip(pixel, PALETTE[group.colour], strict=True)]
                assert max(differences) <= tolerance, (group, figure, pixel)
                num_checked += 1
    assert num_checked > 150


# ---- captions: parsed by a grammar written from the outside ----------------------------------------------------------


def alternatives(words: dict[Any, tuple[str, ...]]) -> dict[str, set[Any]]:
    """Return everything that each word may mean."""
    found: dict[str, set[Any]] = {}
    for meaning, texts in words.items():
        for text in texts:
            found.setdefault(text, set()).add(meaning)
    return found


def pattern(name: str, words: Any) -> str:
    return f"(?P<{name}>{'|'.join(sorted(map(re.escape, words), key=len, reverse=True))})"


COUNTS = {"a": 1, "an": 1, "one": 1, "a single": 1, "two": 2, "a pair of": 2, "three": 3, "a trio of": 3}
NOUNS = {
    noun if number == 1 else pluralize(noun): (shape, number)
    for shape, nouns in SHAPE_NOUNS.items()
    for noun in nouns
    for number in (1, 2)
}
PHRASE = re.compile(
    rf"\b{pattern('count', COUNTS)} (?:{pattern('size', alternatives(SIZE_ADJECTIVES))} )?"
    rf"(?:{pattern('pattern', alternatives(PATTERN_ADJECTIVES))} )?{pattern('colour', alternatives(COLOUR_ADJECTIVES))} "
    rf"{pattern('noun', NOUNS)}\b(?: {pattern('place', alternatives(PLACES))})?"
    rf"(?: {pattern('relation', alternatives(RELATIONS))}(?= ))?"
)
BACKGROUND = re.compile(
    rf"(?:on|against|over) a (?:{pattern('texture', alternatives(TEXTURE_ADJECTIVES))} )?"
    rf"{pattern('colour', alternatives(BACKGROUND_ADJECTIVES))} (?:background|backdrop)"
)
REST = re.compile(
    r"(?:(?:a picture of|an image of|a drawing of|this shows|we see|here we have|there is|there are) )?"
    r"N(?: (?:(?:with|and|along with) )?N)*"
)


def check_caption(text: str, scene: Scene) -> Counter[str]:
    """Assert that everything said is true, and return what kinds of things were said."""
    said: Counter[str] = Counter()
    background = BACKGROUND.search(text)
    if background:
        assert scene.background_colour in alternatives(BACKGROUND_ADJECTIVES)[background["colour"]], text
        if background["texture"]:
            assert scene.background_texture in alternatives(TEXTURE_ADJECTIVES)[background["texture"]], text
        said["background"] += 1
        text = BACKGROUND.sub("", text).strip(" ,")
    groups = []
    matches = list(PHRASE.finditer(text))
    for match in matches:
        shape, number = NOUNS[match["noun"]]
        (colour,) = alternatives(COLOUR_ADJECTIVES)[match["colour"]]
        possible = [group for group in scene.groups if (group.shape, group.colour) == (shape, colour)]
        assert len(possible) == 1, (text, scene)
        group = possible[0]
        count = COUNTS[match["count"]]
        assert len(group.figures) == count, (text, scene)
        assert (count == 1) == (number == 1) or shape == "fish", f"number of the noun in {text!r}"
        assert not match["size"] or group.size in alternatives(SIZE_ADJECTIVES)[match["size"]], (text, scene)
        assert not match["pattern"] or group.pattern in alternatives(PATTERN_ADJECTIVES)[match["pattern"]], (
            text,
            scene,
        )
        if match["place"]:
            (place,) = alternatives(PLACES)[match["place"]]
            assert all((int(figure.x * 3), int(figure.y * 3)) == place for figure in group.figures), (text, scene)
        groups.append(group)
        said.update(name for name, value in match.groupdict().items() if value)
    for match, one, other in zip(matches, groups, groups[1:], strict=False):
        if match["relation"]:
            (relation,) = alternatives(RELATIONS)[match["relation"]]
            pairs = list(itertools.product(one.figures, other.figures))
            holds = {
                "left": all(a.x < b.x for a, b in pairs),
                "right": all(a.x > b.x for a, b in pairs),
                "above": all(a.y < b.y for a, b in pairs),
                "below": all(a.y > b.y for a, b in pairs),
                "beside": all(measure_gap(a, b) < 0.15 for a, b in pairs),
            }
            assert holds[relation], (text, scene)
    assert scene.groups[0] in groups, f"the main concept is said in {text!r}"
    assert len(set(map(id, groups))) == len(groups), f"nothing is said twice in {text!r}"
    assert REST.fullmatch(PHRASE.sub("N", text)), f"{text!r} was not understood: {PHRASE.sub('N', text)!r}"
    if text.startswith("there "):
        assert text.startswith("there is" if len(groups[0].figures) == 1 else "there are"), text
    return said


def test_captions_are_true() -> None:
    generator = random.Random(7)
    said: Counter[str] = Counter()
    for scene in scenes(1500):
        said += check_caption(generate_caption(scene, generator), scene)
    wanted = {"count", "size", "pattern", "colour", "noun", "place", "relation", "background"}
    assert all(said[name] > 150 for name in wanted), said


def test_the_check_of_captions_finds_what_is_false() -> None:
    """Nearly all captions become false when words are swapped for others of the same kind."""
    generator = random.Random(8)
    swaps = [
        ("a", "two"),
        ("large", "small"),
        ("striped", "dotted"),
        ("red", "blue"),
        ("left", "right"),
        ("above", "below"),
    ]
    num_changed = num_found = 0
    for scene in scenes(600):
        text = generate_caption(scene, generator)
        for one, other in swaps:
            changed = re.sub(rf"\b{one}\b", other, text)
            if changed != text and not re.search(r"two (?:pair|trio|single)", changed):
                num_changed += 1
                try:
                    check_caption(changed, scene)
                except AssertionError:
                    num_found += 1
    assert num_changed > 300
    assert num_found == num_changed


def test_captions_of_a_scene_differ_and_leave_things_out() -> None:
    generator = random.Random(9)
    lengths = []
    for scene in scenes(200):
        found = generate_captions(scene, 5, generator)
        assert len(set(found)) == 5
        lengths += [len(text.split()) for text in found]
    assert min(lengths) <= 4
    assert sum(length <= 28 for length in lengths) > 0.95 * len(lengths)


def test_vocabularies_name_everything_that_can_be_drawn() -> None:
    assert set(SHAPE_NOUNS) == set(SHAPES)
    assert set(COLOUR_ADJECTIVES) == set(COLOURS)
    assert set(SIZE_ADJECTIVES) == set(RADII)
    assert set(COUNT_WORDS) == {1, 2, 3}
    for words in (SHAPE_NOUNS, COLOUR_ADJECTIVES, SIZE_ADJECTIVES, PATTERN_ADJECTIVES, BACKGROUND_ADJECTIVES, PLACES):
        assert all(len(meanings) == 1 for meanings in alternatives(words).values()), "no word has two meanings"


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
