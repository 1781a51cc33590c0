"""Test that scenes are drawn as they say, and that their captions are true, parsed by a grammar written from the outside."""

from __future__ import annotations

import itertools
import random
import re
from collections import Counter
from typing import Any

import pytest

from pipelines.sample.drawing import COLOUR_JITTER, PALETTE, render
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
    draw_scene,
    measure_gap,
)


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
