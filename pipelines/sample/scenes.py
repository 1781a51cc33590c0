"""Scenes of the sample images: what they show, captions that state only what they show, and their pixels.

A scene has a main group of figures that shows its concept, a pair of shape and colour, other groups, and a background.
Concepts follow a Zipf law with exponent s: the concept of rank r (1 is the most frequent) has probability r^−s / Σ_q q^−s,
so that there are frequent and rare concepts by construction. Everything else in a scene is drawn independently of them.

Lengths are fractions of the canvas, with x to the right and y downwards from the top left corner; angles are in radians.

A caption always names the main group's shape and colour, with one of several words for each. Whether it mentions anything
else (size, pattern, place, other groups, relations, background), in which order and in which words, is drawn anew for every
caption.

A figure's outline is filled at four times the resolution and averaged down to a mask. Its colour is pasted through this
mask, and then a darker shade of it where the pattern's mask is set too. Backgrounds use the same pattern masks with a fainter
shade. Colours vary a little from figure to figure, and noise is added to the whole image.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from PIL import Image, ImageChops, ImageDraw

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


SHAPE_NOUNS = {
    "circle": ("circle", "disc"), "square": ("square", "box"), "triangle": ("triangle",), "star": ("star",),
    "diamond": ("diamond", "rhombus"), "hexagon": ("hexagon",), "cross": ("cross", "plus sign"), "heart": ("heart",),
    "crescent": ("crescent", "moon"), "arrow": ("arrow", "pointer"), "ring": ("ring", "hoop"), "oval": ("oval", "ellipse"),
    "semicircle": ("semicircle", "half circle", "dome"), "drop": ("drop", "teardrop"), "flower": ("flower", "blossom"),
    "cloud": ("cloud",), "house": ("house", "cottage"), "tree": ("tree", "fir"), "fish": ("fish",),
    "bolt": ("bolt", "lightning bolt"),
}  # fmt: skip
"""Nouns for every shape in SHAPES; the first is the most frequent."""
COLOUR_ADJECTIVES = {
    "red": ("red", "scarlet", "crimson"), "orange": ("orange", "tangerine"), "yellow": ("yellow", "golden"),
    "green": ("green", "emerald"), "teal": ("teal", "turquoise"), "blue": ("blue", "cobalt"), "purple": ("purple", "violet"),
    "pink": ("pink", "rose"), "brown": ("brown", "chestnut"), "black": ("black", "dark"),
}  # fmt: skip
SIZE_ADJECTIVES = {
    "small": ("small", "little", "tiny"), "medium": ("medium", "middling"), "large": ("large", "big", "huge"),
}  # fmt: skip
PATTERN_ADJECTIVES = {
    "plain": ("plain", "solid"), "striped": ("striped", "banded"), "dotted": ("dotted", "spotted"),
    "checkered": ("checkered", "chequered"),
}  # fmt: skip
BACKGROUND_ADJECTIVES = {
    "white": ("white",), "grey": ("grey", "silver"), "cream": ("cream", "beige"), "sky": ("pale blue", "light blue"),
    "mint": ("pale green", "light green"), "lavender": ("lilac", "light purple"),
}  # fmt: skip
TEXTURE_ADJECTIVES = {
    **PATTERN_ADJECTIVES, "shaded": ("shaded", "fading"), "grainy": ("grainy", "rough"),
}  # fmt: skip
COUNT_WORDS = {1: ("a", "a", "one", "a single"), 2: ("two", "two", "a pair of"), 3: ("three", "three", "a trio of")}
PLACES = {
    (0, 0): ("in the top left corner", "at the upper left"), (1, 0): ("at the top", "near the top edge"),
    (2, 0): ("in the top right corner", "at the upper right"), (0, 1): ("on the left side", "near the left edge"),
    (1, 1): ("in the middle", "at the centre"), (2, 1): ("on the right side", "near the right edge"),
    (0, 2): ("in the bottom left corner", "at the lower left"), (1, 2): ("at the bottom", "near the bottom edge"),
    (2, 2): ("in the bottom right corner", "at the lower right"),
}  # fmt: skip
"""Phrases for the place of a single figure, by the cell (column, row) of a 3 × 3 grid that its centre lies in."""
RELATIONS = {
    "left": ("left of", "to the left of"), "right": ("right of", "to the right of"),
    "above": ("above", "over", "higher than"), "below": ("below", "under", "lower than"), "beside": ("beside", "next to"),
}  # fmt: skip
"""Phrases for every relation between two groups.

For example, `left` means that the centre of every figure of the first group is further left than all centres of the
second.
"""

_OPENINGS = ("a picture of", "an image of", "a drawing of", "this shows", "we see", "here we have")
_INVERSE = {"left": "right", "right": "left", "above": "below", "below": "above", "beside": "beside"}
_MIN_OFFSET = 0.08
_MAX_GAP_BESIDE = 0.12

_SAY_SIZE = 0.35
_SAY_PATTERN = {True: 0.1, False: 0.6}  # The key says whether the pattern is plain.
_SAY_PLACE = 0.3
_SAY_OTHER = 0.6
_SAY_RELATION = 0.6
_SAY_BACKGROUND = 0.4


def generate_caption(scene: Scene, generator: random.Random) -> str:
    """Generate one true caption, in lower case and without a full stop."""
    main, *rest = scene.groups
    others = [group for group in rest if generator.random() < _SAY_OTHER]
    generator.shuffle(others)
    words = _add_place(_generate_noun_phrase(main, generator), main, generator)
    first = main
    if others:
        other, *others = others
        phrase = _add_place(_generate_noun_phrase(other, generator), other, generator)
        possible = find_relations(main, other)
        if possible and generator.random() < _SAY_RELATION:
            relation = generator.choice(possible)
            if generator.random() < 0.3:
                words = f"{phrase} {generator.choice(RELATIONS[_INVERSE[relation]])} {words}"
                first = other
            else:
                words = f"{words} {generator.choice(RELATIONS[relation])} {phrase}"
        elif generator.random() < 0.2:
            words, first = f"{phrase} and {words}", other
        else:
            words = f"{words} {generator.choice(('with', 'and'))} {phrase}"
    for other in others:
        conjunction = generator.choice(("and", "along with"))
        words += f" {conjunction} {_add_place(_generate_noun_phrase(other, generator), other, generator)}"
    chance = generator.random()
    if chance < 0.3:
        words = f"{generator.choice(_OPENINGS)} {words}"
    elif chance < 0.45:
        words = f"there {'is' if len(first.figures) == 1 else 'are'} {words}"
    elif chance < 0.55:
        return f"{_generate_background(scene, generator)}, {words}"
    return f"{words} {_generate_background(scene, generator)}" if generator.random() < _SAY_BACKGROUND else words


def generate_captions(scene: Scene, number: int, generator: random.Random) -> list[str]:
    """Generate `number` distinct captions; apart from that, each is drawn independently of the others."""
    distinct: dict[str, None] = {}
    while len(distinct) < number:
        distinct[generate_caption(scene, generator)] = None
    return list(distinct)


def find_relations(group: Group, other: Group) -> list[str]:
    """Return the keys of RELATIONS that hold for the first group relative to the second."""
    names = []
    for low, high, axis in (("left", "right", "x"), ("above", "below", "y")):
        first = [getattr(figure, axis) for figure in group.figures]
        second = [getattr(figure, axis) for figure in other.figures]
        if max(first) + _MIN_OFFSET < min(second):
            names.append(low)
        elif max(second) + _MIN_OFFSET < min(first):
            names.append(high)
    are_single = len(group.figures) == len(other.figures) == 1
    if are_single and measure_gap(group.figures[0], other.figures[0]) < _MAX_GAP_BESIDE:
        names.append("beside")
    return names


def pluralize(noun: str) -> str:
    """Return the plural of one of the nouns above: boxes, crosses, rhombuses, fish."""
    if noun == "fish":
        return noun
    return noun + ("es" if noun.endswith(("s", "x")) else "s")


def _generate_noun_phrase(group: Group, generator: random.Random) -> str:
    """Generate a noun phrase for a group, such as `a large striped red circle` or `two little crimson discs`."""
    words = []
    if generator.random() < _SAY_SIZE:
        words.append(generator.choice(SIZE_ADJECTIVES[group.size]))
    if generator.random() < _SAY_PATTERN[group.pattern == "plain"]:
        words.append(generator.choice(PATTERN_ADJECTIVES[group.pattern]))
    words.append(_draw_usual(COLOUR_ADJECTIVES[group.colour], generator))
    noun = _draw_usual(SHAPE_NOUNS[group.shape], generator)
    count = len(group.figures)
    words.append(noun if count == 1 else pluralize(noun))
    determiner = generator.choice(COUNT_WORDS[count])
    if determiner == "a" and words[0][0] in "aeiou":
        determiner = "an"
    return " ".join([determiner, *words])


def _add_place(phrase: str, group: Group, generator: random.Random) -> str:
    """Return the phrase, sometimes followed by the place of the figure if the group has only one."""
    if len(group.figures) > 1 or generator.random() >= _SAY_PLACE:
        return phrase
    figure = group.figures[0]
    return f"{phrase} {generator.choice(PLACES[int(3 * figure.x), int(3 * figure.y)])}"


def _generate_background(scene: Scene, generator: random.Random) -> str:
    words = [generator.choice(("on", "against", "over")), "a"]
    if scene.background_texture != "plain" and generator.random() < 0.6:
        words.append(generator.choice(TEXTURE_ADJECTIVES[scene.background_texture]))
    words.append(generator.choice(BACKGROUND_ADJECTIVES[scene.background_colour]))
    words.append(generator.choice(("background", "background", "backdrop")))
    return " ".join(words)


def _draw_usual(choices: Sequence[str], generator: random.Random) -> str:
    """Draw one of the choices: the first has the same probability as all others together."""
    return choices[0] if len(choices) == 1 or generator.random() < 0.5 else generator.choice(choices[1:])


PALETTE = {
    "red": (208, 32, 36), "orange": (242, 130, 20), "yellow": (232, 204, 16), "green": (36, 150, 52),
    "teal": (10, 150, 150), "blue": (36, 68, 208), "purple": (120, 40, 160), "pink": (240, 104, 172),
    "brown": (124, 76, 36), "black": (28, 28, 30),
    "white": (246, 246, 246), "grey": (186, 188, 190), "cream": (246, 234, 200), "sky": (186, 214, 246),
    "mint": (194, 236, 204), "lavender": (216, 200, 240),
}  # fmt: skip
"""RGB value of every colour in COLOURS and BACKGROUND_COLOURS."""
COLOUR_JITTER = 14
"""Maximum random difference of a colour channel from the palette, out of 255."""

_SCALE = 4
_FIGURE_SHADE = 0.5
_BACKGROUND_SHADE = 0.84
_NOISE = 0.04

Color = tuple[int, ...]
Point = tuple[float, float]
Outline = tuple[Sequence[Point], bool]
"""A polygon inside the unit circle, and whether it is added to the figure (True) or cut out of it (False)."""


def render(scene: Scene, image_size: int, generator: random.Random) -> Image.Image:
    """Render the scene as an RGB image of `image_size` × `image_size` pixels."""
    image = _background(scene, image_size, generator)
    for group in scene.groups:
        for figure in group.figures:
            _draw_figure(image, group, figure, generator)
    noise = Image.frombytes("RGB", image.size, generator.randbytes(3 * image_size**2))
    return Image.blend(image, noise, _NOISE)


def _background(scene: Scene, image_size: int, generator: random.Random) -> Image.Image:
    colour = _jitter(PALETTE[scene.background_colour], generator)
    image = Image.new("RGB", (image_size, image_size), colour)
    if scene.background_texture == "shaded":
        mask = Image.linear_gradient("L").resize(image.size)
    elif scene.background_texture == "grainy":
        mask = Image.frombytes("L", image.size, generator.randbytes(image_size**2))
    else:
        mask = _pattern_crop(scene.background_texture, image_size, image_size / 8, generator)
    image.paste(_shade(colour, _BACKGROUND_SHADE), (0, 0), mask)
    return image


def _draw_figure(image: Image.Image, group: Group, figure: Figure, generator: random.Random) -> None:
    canvas = image.width
    size = math.ceil(2 * figure.radius * canvas) + 2
    left, top = round(figure.x * canvas - size / 2), round(figure.y * canvas - size / 2)
    # `left` and `top` are rounded to whole pixels; the fraction that was rounded off is kept in the centre.
    centre = ((figure.x * canvas - left) * _SCALE, (figure.y * canvas - top) * _SCALE)
    radius = figure.radius * canvas * _SCALE
    cos, sin = radius * math.cos(figure.angle), radius * math.sin(figure.angle)
    mask = Image.new("L", (size * _SCALE, size * _SCALE))
    draw = ImageDraw.Draw(mask)
    for points, is_added in OUTLINES[group.shape]:
        turned = [(centre[0] + cos * x - sin * y, centre[1] + sin * x + cos * y) for x, y in points]
        draw.polygon(turned, fill=255 if is_added else 0)
    mask = mask.reduce(_SCALE)
    colour = _jitter(PALETTE[group.colour], generator)
    image.paste(colour, (left, top), mask)
    if group.pattern != "plain":
        pattern = _pattern_crop(group.pattern, size, canvas / 16, generator)
        image.paste(_shade(colour, _FIGURE_SHADE), (left, top), ImageChops.multiply(mask, pattern))


def _jitter(colour: Color, generator: random.Random) -> Color:
    return tuple(max(0, min(255, channel + generator.randint(-COLOUR_JITTER, COLOUR_JITTER))) for channel in colour)


def _shade(colour: Color, factor: float) -> Color:
    """Return a shade of a colour: darker by the factor, or lighter if the colour is already dark."""
    return tuple(channel + 110 if sum(colour) < 150 else round(channel * factor) for channel in colour)


# ---- patterns --------------------------------------------------------------------------------------------------------


def _pattern_crop(pattern: str, size: int, period: float, generator: random.Random) -> Image.Image:
    """Return a square mask of `size` pixels, cut from a random place of the infinitely repeated pattern."""
    period = max(2, round(period))
    mask = _pattern_mask(pattern, size + period, period)
    left, top = generator.randrange(period), generator.randrange(period)
    return mask.crop((left, top, left + size, top + size))


@functools.cache
def _pattern_mask(pattern: str, size: int, period: int) -> Image.Image:
    """Return the mask of the pattern's second colour, which repeats every `period` pixels in both directions."""
    mask = Image.new("L", (size * _SCALE, size * _SCALE))
    draw = ImageDraw.Draw(mask)
    step = period * _SCALE
    for left in range(0, mask.width, step):
        if pattern == "striped":
            draw.rectangle((left, 0, left + step // 2 - 1, mask.height), fill=255)
        for top in range(0, mask.height, step):
            if pattern == "dotted":
                draw.ellipse(
                    (left + step // 5, top + step // 5, left + step - step // 5, top + step - step // 5), fill=255
                )
            elif pattern == "checkered":
                draw.rectangle((left, top, left + step // 2 - 1, top + step // 2 - 1), fill=255)
                draw.rectangle((left + step // 2, top + step // 2, left + step - 1, top + step - 1), fill=255)
    return mask.reduce(_SCALE)


# ---- shapes ----------------------------------------------------------------------------------------------------------


def _regular(num_corners: int, *, start: float = -90.0, radius: float = 1.0, centre: Point = (0, 0)) -> list[Point]:
    """Return a regular polygon; `start` is the direction of its first corner in degrees, where −90 is up."""
    return _arc(start, start + 360 * (1 - 1 / num_corners), radius=radius, centre=centre, num_points=num_corners)


def _arc(start: float, end: float, *, radius: float = 1.0, centre: Point = (0, 0), num_points: int = 24) -> list[Point]:
    angles = [math.radians(start + (end - start) * number / (num_points - 1)) for number in range(num_points)]
    return [(centre[0] + radius * math.cos(angle), centre[1] + radius * math.sin(angle)) for angle in angles]


def _disc(radius: float = 1.0, centre: Point = (0, 0)) -> list[Point]:
    return _regular(32, radius=radius, centre=centre)


def _star() -> list[Point]:
    outer, inner = _regular(5), _regular(5, start=-54, radius=0.42)
    return list(itertools.chain.from_iterable(zip(outer, inner, strict=True)))


def _heart() -> list[Point]:
    angles = [math.radians(10 * number) for number in range(36)]
    return [
        (math.sin(t) ** 3, -(13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t) - math.cos(4 * t)) / 17)
        for t in angles
    ]


OUTLINES: dict[str, tuple[Outline, ...]] = {
    "circle": ((_disc(0.92), True),),
    "square": ((_regular(4, start=-45), True),),
    "triangle": ((_regular(3), True),),
    "star": ((_star(), True),),
    "diamond": (([(0, -1), (0.62, 0), (0, 1), (-0.62, 0)], True),),
    "hexagon": ((_regular(6), True),),
    "cross": (
        ([(-0.3, -0.95), (0.3, -0.95), (0.3, 0.95), (-0.3, 0.95)], True),
        ([(-0.95, -0.3), (0.95, -0.3), (0.95, 0.3), (-0.95, 0.3)], True),
    ),
    "heart": ((_heart(), True),),
    "crescent": ((_disc(), True), (_disc(0.82, (0.42, -0.1)), False)),
    "arrow": (
        ([(-0.98, -0.22), (0.1, -0.22), (0.1, -0.7), (0.98, 0), (0.1, 0.7), (0.1, 0.22), (-0.98, 0.22)], True),
    ),
    "ring": ((_disc(), True), (_disc(0.55), False)),
    "oval": (([(x, 0.58 * y) for x, y in _disc()], True),),
    "semicircle": ((_arc(180, 360, centre=(0, 0.4)), True),),
    "drop": (([(0, -1), *_arc(-25, 205, radius=0.6, centre=(0, 0.38))], True),),
    "flower": (
        *((_disc(0.4, centre), True) for centre in _regular(5, radius=0.6)),
        (_disc(0.24), False),
    ),
    "cloud": (
        (_disc(0.42, (-0.5, 0.12)), True), (_disc(0.55, (0, -0.12)), True), (_disc(0.4, (0.55, 0.14)), True),
        ([(-0.55, 0.1), (0.6, 0.1), (0.6, 0.54), (-0.55, 0.54)], True),
    ),
    "house": (
        ([(0, -1), (0.9, -0.15), (0.65, -0.15), (0.65, 0.75), (-0.65, 0.75), (-0.65, -0.15), (-0.9, -0.15)], True),
        ([(-0.18, 0.2), (0.18, 0.2), (0.18, 0.75), (-0.18, 0.75)], False),
    ),
    "tree": (
        ([(0, -1), (0.45, -0.35), (-0.45, -0.35)], True), ([(0, -0.65), (0.7, 0.5), (-0.7, 0.5)], True),
        ([(-0.14, 0.5), (0.14, 0.5), (0.14, 0.98), (-0.14, 0.98)], True),
    ),
    "fish": (
        ([(-0.25 + 0.72 * x, 0.48 * y) for x, y in _disc()], True), ([(0.25, 0), (0.95, -0.5), (0.95, 0.5)], True),
        (_disc(0.1, (-0.6, -0.1)), False),
    ),
    "bolt": (
        ([(0.25, -0.97), (-0.55, 0.12), (-0.05, 0.12), (-0.25, 0.97), (0.55, -0.22), (0.05, -0.22)], True),
    ),
}  # fmt: skip
"""Polygons of every shape in SHAPES, in the order in which they are filled."""
