"""Generate captions of a sample scene from a small English grammar that states only what the scene shows.

A caption always names the main group's shape and colour, with one of several words for each. Whether it mentions
anything else (size, pattern, place, other groups, relations, background), in which order and in which words, is drawn
anew for every caption. Two captions of a scene are therefore paraphrases, and either may contain details that the
other omits.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from pipelines.sample.scenes import Group, Scene, measure_gap

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
    if (
        len(group.figures) == len(other.figures) == 1
        and measure_gap(group.figures[0], other.figures[0]) < _MAX_GAP_BESIDE
    ):
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
