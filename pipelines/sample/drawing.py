"""Render a sample scene to pixels: anti-aliased figures with patterns on a textured background.

A figure's outline is filled at four times the resolution and averaged down to a mask. The figure's colour is pasted
through this mask, and then a darker shade of it where the pattern's mask is set too. Backgrounds use the same pattern
masks with a fainter shade. Colours vary a little from figure to figure, as real paint and light do, and noise is
added to the whole image.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Sequence

from PIL import Image, ImageChops, ImageDraw

from pipelines.sample.scenes import Figure, Group, Scene

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

Color = tuple[int, int, int]
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
    red, green, blue = (
        max(0, min(255, channel + generator.randint(-COLOUR_JITTER, COLOUR_JITTER))) for channel in colour
    )
    return red, green, blue


def _shade(colour: Color, factor: float) -> Color:
    """Return a shade of a colour: darker by the factor, or lighter if the colour is already dark."""
    if sum(colour) < 150:
        red, green, blue = (channel + 110 for channel in colour)
    else:
        red, green, blue = (round(channel * factor) for channel in colour)
    return red, green, blue


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
    return [
        point
        for outer, inner in zip(_regular(5), _regular(5, start=-54, radius=0.42), strict=True)
        for point in (outer, inner)
    ]


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
