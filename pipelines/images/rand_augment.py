"""RandAugment: apply a few operations, drawn from a fixed list, at one strength (Cubuk et al., arXiv 1909.13719).

The list is the one used in vision-language pre-training: no operation changes colours so much that a caption becomes
false.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

MAX_MAGNITUDE = 10

_GREY = (128, 128, 128)
_MAX_SHEAR = 0.3
_MAX_SHIFT = 0.45  # As a fraction of the image's side.
_MAX_DEGREES = 30.0
_MAX_CHANGE = 0.9  # Largest relative change of brightness or sharpness.

Operation = Callable[[Image.Image, float], Image.Image]
"""Function of an image and a strength in [−1, 1]; the sign is the direction, for operations that have one."""


def _transform(image: Image.Image, *matrix: float) -> Image.Image:
    return image.transform(
        image.size, Image.Transform.AFFINE, matrix, resample=Image.Resampling.BILINEAR, fillcolor=_GREY
    )


OPERATIONS: dict[str, Operation] = {
    "identity": lambda image, _: image,
    "auto_contrast": lambda image, _: ImageOps.autocontrast(image),
    "equalise": lambda image, _: ImageOps.equalize(image),
    "brightness": lambda image, strength: ImageEnhance.Brightness(image).enhance(1 + _MAX_CHANGE * strength),
    "sharpness": lambda image, strength: ImageEnhance.Sharpness(image).enhance(1 + _MAX_CHANGE * strength),
    "shear_x": lambda image, strength: _transform(image, 1, _MAX_SHEAR * strength, 0, 0, 1, 0),
    "shear_y": lambda image, strength: _transform(image, 1, 0, 0, _MAX_SHEAR * strength, 1, 0),
    "shift_x": lambda image, strength: _transform(image, 1, 0, _MAX_SHIFT * strength * image.width, 0, 1, 0),
    "shift_y": lambda image, strength: _transform(image, 1, 0, 0, 0, 1, _MAX_SHIFT * strength * image.height),
    "rotate": lambda image, strength: image.rotate(
        _MAX_DEGREES * strength, resample=Image.Resampling.BILINEAR, fillcolor=_GREY
    ),
}
"""Operations on an RGB image, by name."""


def rand_augment(image: Image.Image, num_operations: int, magnitude: float, rng: np.random.Generator) -> Image.Image:
    """Apply `num_operations` operations, drawn with replacement, at strength ±magnitude / 10 with random signs."""
    names = list(OPERATIONS)
    for choice, sign in zip(rng.integers(len(names), size=num_operations), rng.random(num_operations), strict=True):
        strength = magnitude / MAX_MAGNITUDE * (1 if sign < 0.5 else -1)
        image = OPERATIONS[names[choice]](image, strength)
    return image
