"""What is in a sample image: a main group of figures that carries the meaning, some others, and a background.

Every scene has one main concept, a pair of shape and colour. Concepts follow a Zipf law: the concept of rank r (1 is the
most frequent) has the probability r^−s / Σ_q q^−s, so that frequent and rare meanings exist by construction. Everything
else in a scene is drawn evenly, so that images of one concept differ in details only.

Lengths are fractions of the canvas: x to the right, y downwards, from the top left corner. Angles are radians.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

SHAPES = (
    "circle", "square", "triangle", "star", "diamond", "hexagon", "cross", "heart", "crescent", "arrow", "ring", "oval",
    "semicircle", "drop", "flower", "cloud", "house", "tree", "fish", "bolt",
)  # fmt: skip
COLOURS = ("red", "orange", "yellow", "green", "teal", "blue", "purple", "pink", "brown", "black")
PATTERNS = ("plain", "striped", "dotted", "checkered")
BACKGROUND_COLOURS = ("white", "grey", "cream", "sky", "mint", "lavender")
BACKGROUND_TEXTURES = (*PATTERNS, "shaded", "grainy")
RADII = {"small": (0.085, 0.115), "medium": (0.13, 0.16), "large": (0.20, 0.25)}
"""The range of a figure's radius for every word of size; they do not touch, so that a size can be told."""

_MAIN_SIZES = {1: ("large",), 2: ("large", "medium"), 3: ("medium",)}  # By the number of figures.
_OTHER_SIZES = {1: ("small", "small", "medium"), 2: ("small",)}  # Less to be seen than the main group, in any case.
_MAIN_COUNTS = ((1, 2, 3), (6, 3, 2))
_OTHER_COUNTS = ((1, 2), (4, 1))
_NUM_OTHERS = ((1, 2, 3), (4, 3, 1))
MAX_FIGURES = 5
_NUM_PLACEMENTS = 60
_MARGIN = 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class Concept:
    """The main meaning of a scene."""

    shape: str
    colour: str

    @property
    def name(self) -> str:
        """As it is said: `red circle`."""
        return f"{self.colour} {self.shape}"


CONCEPTS = tuple(
    Concept(shape=shape, colour=colour)
    # Shuffled, once and for all, so that a concept's rank says nothing about its shape or its colour.
    for shape, colour in random.Random("concepts").sample(list(itertools.product(SHAPES, COLOURS)), 200)
)
"""All 200 concepts, the most frequent first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One drawn thing."""

    x: float
    y: float
    radius: float
    angle: float
    """Clockwise; small, as an arrow still has to point to the right."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """One to three figures that look the same."""

    shape: str
    colour: str
    size: str
    pattern: str
    figures: tuple[Figure, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """A whole image, as a list of what is to be seen."""

    groups: tuple[Group, ...]
    """The main group first. No two share a shape and a colour."""
    background_colour: str
    background_texture: str


def zipf_probabilities(exponent: float) -> list[float]:
    """P(rank r) = r^−s / Σ_q q^−s for every concept of CONCEPTS."""
    weights = [rank**-exponent for rank in range(1, len(CONCEPTS) + 1)]
    return [weight / sum(weights) for weight in weights]


def draw_concepts(number: int, exponent: float, generator: random.Random) -> list[int]:
    """`number` independent indices into CONCEPTS by the Zipf law."""
    return generator.choices(range(len(CONCEPTS)), weights=zipf_probabilities(exponent), k=number)


def draw_scene(concept: Concept, generator: random.Random) -> Scene:
    """A scene whose main group is of this concept, with two to MAX_FIGURES figures in all where they find room."""
    taken: list[Figure] = []
    count = _weighted(generator, _MAIN_COUNTS)
    size = generator.choice(_MAIN_SIZES[count])
    groups = [_draw_group(concept, size, count, taken, generator)]
    for _ in range(_weighted(generator, _NUM_OTHERS)):
        count = min(_weighted(generator, _OTHER_COUNTS), MAX_FIGURES - len(taken))
        other = Concept(shape=generator.choice(SHAPES), colour=generator.choice(COLOURS))
        if count and all((group.shape, group.colour) != (other.shape, other.colour) for group in groups):
            group = _draw_group(other, generator.choice(_OTHER_SIZES[count]), count, taken, generator)
            if group.figures:
                groups.append(group)
    return Scene(
        groups=tuple(groups),
        background_colour=generator.choice(BACKGROUND_COLOURS),
        background_texture=generator.choice(BACKGROUND_TEXTURES),
    )


def _draw_group(concept: Concept, size: str, count: int, taken: list[Figure], generator: random.Random) -> Group:
    """A group whose figures, as many of `count` as find room, overlap nothing in `taken`, to which they are added."""
    figures: list[Figure] = []
    low, high = RADII[size]
    for _ in range(_NUM_PLACEMENTS):
        radius = generator.uniform(low, high)
        edge = radius + _MARGIN
        figure = Figure(
            x=round(generator.uniform(edge, 1 - edge), 4),
            y=round(generator.uniform(edge, 1 - edge), 4),
            radius=round(radius, 4),
            angle=round(generator.uniform(-0.3, 0.3), 4),
        )
        if len(figures) < count and all(gap(figure, other) > _MARGIN for other in taken):
            figures.append(figure)
            taken.append(figure)
    return Group(
        shape=concept.shape,
        colour=concept.colour,
        size=size,
        pattern=generator.choices(PATTERNS, weights=(3, 1, 1, 1))[0],
        figures=tuple(figures),
    )


def gap(one: Figure, other: Figure) -> float:
    """The distance between the circles around two figures; negative where they overlap."""
    return math.hypot(one.x - other.x, one.y - other.y) - one.radius - other.radius


def _weighted(generator: random.Random, table: tuple[Sequence[int], Sequence[int]]) -> int:
    return generator.choices(table[0], weights=table[1])[0]
