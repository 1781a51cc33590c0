"""Draw the content of a sample image: a main group of figures that shows its concept, other groups, and a background.

Every scene has one main concept, which is a pair of shape and colour. Concepts follow a Zipf law with exponent s: the
concept of rank r (1 is the most frequent) has probability r^−s / Σ_q q^−s, so that there are frequent and rare
concepts by construction. Everything else in a scene is drawn independently of the concept, so that images of one
concept differ in details only.

Lengths are fractions of the canvas, with x to the right and y downwards from the top left corner. Angles are in
radians.
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
"""Range of a figure's radius for every size word; the ranges are disjoint, so that sizes can be told apart."""

# Possible sizes by the number of figures in the group; other groups are always less prominent than the main group.
_MAIN_SIZES = {1: ("large",), 2: ("large", "medium"), 3: ("medium",)}
_OTHER_SIZES = {1: ("small", "small", "medium"), 2: ("small",)}
# Numbers of figures in a group, and of other groups, each with the weights of these numbers.
_MAIN_COUNTS = ((1, 2, 3), (6, 3, 2))
_OTHER_COUNTS = ((1, 2), (4, 1))
_NUM_OTHERS = ((1, 2, 3), (4, 3, 1))
MAX_FIGURES = 5
_NUM_PLACEMENTS = 60
_MARGIN = 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class Concept:
    """Main meaning of a scene: a shape and its colour."""

    shape: str
    colour: str

    @property
    def name(self) -> str:
        """Name of the concept in words, such as `red circle`."""
        return f"{self.colour} {self.shape}"


CONCEPTS = tuple(
    Concept(shape=shape, colour=colour)
    # Shuffled with a fixed seed, so that a concept's rank is independent of its shape and colour.
    for shape, colour in random.Random("concepts").sample(list(itertools.product(SHAPES, COLOURS)), 200)
)
"""All 200 concepts, the most frequent first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One drawn figure, described by the circle around it."""

    x: float
    y: float
    radius: float
    angle: float
    """Clockwise rotation in radians; it is small, so that an arrow, for example, still points to the right."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Group of one to three figures that look the same."""

    shape: str
    colour: str
    size: str
    pattern: str
    figures: tuple[Figure, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """Description of a whole image."""

    groups: tuple[Group, ...]
    """Groups of figures, the main group first; no two groups have both the same shape and the same colour."""
    background_colour: str
    background_texture: str


def zipf_probabilities(exponent: float) -> list[float]:
    """Return P(rank r) = r^−s / Σ_q q^−s for every concept of CONCEPTS, where s is the exponent."""
    weights = [rank**-exponent for rank in range(1, len(CONCEPTS) + 1)]
    return [weight / sum(weights) for weight in weights]


def draw_concepts(number: int, exponent: float, generator: random.Random) -> list[int]:
    """Draw `number` independent indices into CONCEPTS from the Zipf law."""
    return generator.choices(range(len(CONCEPTS)), weights=zipf_probabilities(exponent), k=number)


def draw_scene(concept: Concept, generator: random.Random) -> Scene:
    """Draw a scene whose main group shows this concept, with at most MAX_FIGURES figures in total.

    The scene has at least two figures, unless there is no room for a second one.
    """
    taken: list[Figure] = []
    count = _draw_weighted(generator, _MAIN_COUNTS)
    size = generator.choice(_MAIN_SIZES[count])
    groups = [_draw_group(concept, size, count, taken, generator)]
    for _ in range(_draw_weighted(generator, _NUM_OTHERS)):
        count = min(_draw_weighted(generator, _OTHER_COUNTS), MAX_FIGURES - len(taken))
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
    """Draw a group of up to `count` figures, as many as there is room for.

    The figures do not overlap those in `taken`, and are appended to it.
    """
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
        if len(figures) < count and all(measure_gap(figure, other) > _MARGIN for other in taken):
            figures.append(figure)
            taken.append(figure)
    return Group(
        shape=concept.shape,
        colour=concept.colour,
        size=size,
        pattern=generator.choices(PATTERNS, weights=(3, 1, 1, 1))[0],
        figures=tuple(figures),
    )


def measure_gap(first: Figure, other: Figure) -> float:
    """Return the distance between the circles around two figures; it is negative if they overlap."""
    return math.hypot(first.x - other.x, first.y - other.y) - first.radius - other.radius


def _draw_weighted(generator: random.Random, table: tuple[Sequence[int], Sequence[int]]) -> int:
    return generator.choices(table[0], weights=table[1])[0]
