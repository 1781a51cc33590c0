"""Views of an image: random crop, flip, RandAugment and colours for training; resize and centre crop for evaluation.

RandAugment (Cubuk et al., arXiv 1909.13719) applies a few operations, drawn from a fixed list, at one strength. The list
is that of vision-language pre-training: no operation changes colours so much that a caption becomes false.

A view is uint8 (S, S, 3) with S pixels per side. Scaling and normalisation happen in the model, on the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

from pipelines.images.decoding import MAX_PIXELS, open_image, shrink_on_load, to_rgb, upright_size

Box = tuple[float, float, float, float]

_NUM_CROP_ATTEMPTS = 10
_MIN_RATIO, _MAX_RATIO = 3 / 4, 4 / 3  # width / height of a crop
MAX_MAGNITUDE = 10
VERSION = 2
"""Increase this whenever an image would be seen otherwise, so that embeddings that are kept are made anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AugmentationConfig:
    """Distribution of the random training views."""

    min_scale: float = 0.5
    """Smallest share of the image's area that a crop covers."""
    flip_probability: float = 0.5
    """Probability of a horizontal flip; use 0 if captions mention left and right."""
    num_operations: int = 0
    """Number of RandAugment operations per image; 0 disables RandAugment."""
    magnitude: float = 7.0
    """Strength of the RandAugment operations, 0 … 10."""
    colour_jitter: float = 0.0
    """Strength s of SimCLR's change of colours, which four of five views have, 0 … 1; 0 disables it."""
    grey_probability: float = 0.0
    """Probability that a view is grey."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.magnitude <= MAX_MAGNITUDE:
            raise ValueError(f"magnitude = {self.magnitude:g} must lie in [0, {MAX_MAGNITUDE}]")


def training_view(
    data: bytes,
    size: int,
    augmentation: AugmentationConfig,
    rng: np.random.Generator,
    *,
    max_pixels: int = MAX_PIXELS,
) -> np.ndarray:
    """Return a random view (S, S, 3) of an image, a pure function of the file's bytes and the generator's state.

    The crop is drawn before decoding, so that a JPEG is decoded no larger than the crop needs. It is resized by a
    bicubic filter that averages over pixels when it reduces the size.
    """
    image = open_image(data, max_pixels)
    width, height = upright_size(image)
    left, top, right, bottom = random_crop(width, height, augmentation, rng)
    is_flipped = rng.random() < augmentation.flip_probability
    # The arguments are the size of the whole image at the scale at which the crop is exactly S × S.
    shrink_on_load(image, (math.ceil(width * size / (right - left)), math.ceil(height * size / (bottom - top))))
    upright = to_rgb(image)
    x, y = upright.width / width, upright.height / height
    box = (left * x, top * y, right * x, bottom * y)
    view = upright.resize((size, size), Image.Resampling.BICUBIC, box=box)
    if is_flipped:
        view = view.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    if augmentation.num_operations:
        view = rand_augment(view, augmentation.num_operations, augmentation.magnitude, rng)
    if augmentation.colour_jitter and rng.random() < _JITTER_PROBABILITY:
        view = jitter_colours(view, augmentation.colour_jitter, rng)
    if augmentation.grey_probability and rng.random() < augmentation.grey_probability:
        view = view.convert("L").convert("RGB")
    return np.asarray(view)


def random_crop(width: int, height: int, augmentation: AugmentationConfig, rng: np.random.Generator) -> Box:
    """Return (left, top, right, bottom) of a random crop, in whole pixels (Szegedy et al., arXiv 1409.4842, §6).

    A share of the area, uniform in [min_scale, 1], and an aspect ratio, log-uniform in [3/4, 4/3], are drawn until the
    rectangle fits into the image, at most ten times; else it is the largest central crop with an allowed ratio.
    """
    low, high = math.log(_MIN_RATIO), math.log(_MAX_RATIO)
    for _ in range(_NUM_CROP_ATTEMPTS):
        share, log_ratio, across, down = rng.random(4).tolist()
        area = width * height * (augmentation.min_scale + share * (1.0 - augmentation.min_scale))
        ratio = math.exp(low + log_ratio * (high - low))
        crop_width, crop_height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < crop_width <= width and 0 < crop_height <= height:
            left, top = int(across * (width - crop_width + 1)), int(down * (height - crop_height + 1))
            return left, top, left + crop_width, top + crop_height
    ratio = min(max(width / height, _MIN_RATIO), _MAX_RATIO)
    crop_width = min(width, max(1, round(height * ratio)))
    crop_height = min(height, max(1, round(width / ratio)))
    left, top = (width - crop_width) // 2, (height - crop_height) // 2
    return left, top, left + crop_width, top + crop_height


def evaluation_view(data: bytes, size: int, *, max_pixels: int = MAX_PIXELS) -> np.ndarray:
    """Return the central square (S, S, 3) of an image that is resized, bicubic and from full size, to a shorter side of S."""
    image = to_rgb(open_image(data, max_pixels))
    shorter = min(image.size)
    # Rounded down, as by Transformers' image processors, whose configuration an export holds.
    width, height = (side * size // shorter for side in image.size)
    left, top = (width - size) // 2, (height - size) // 2
    # Only the centre is resized. Resizing the whole image would make a strip one pixel wide `size` times as long.
    x, y = image.width / width, image.height / height
    box = (left * x, top * y, (left + size) * x, (top + size) * y)
    return np.asarray(image.resize((size, size), Image.Resampling.BICUBIC, box=box))


# ---- RandAugment -----------------------------------------------------------------------------------------------------

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


# ---- colours ---------------------------------------------------------------------------------------------------------

_JITTER_PROBABILITY = 0.8
_ENHANCERS = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)


def jitter_colours(image: Image.Image, strength: float, rng: np.random.Generator) -> Image.Image:
    """Change brightness, contrast, saturation and hue in random order (SimCLR, arXiv 2002.05709, Appendix A).

    The first three are multiplied by factors from [1 − .8s, 1 + .8s], and the hue is turned by up to .2s of the circle.
    """
    changes = rng.uniform(-1.0, 1.0, size=4) * strength
    for number in rng.permutation(4).tolist():
        if number < len(_ENHANCERS):
            image = _ENHANCERS[number](image).enhance(1.0 + 0.8 * changes[number])
        else:
            image = turn_hue(image, 0.2 * changes[number])
    return image


def turn_hue(image: Image.Image, share: float) -> Image.Image:
    """Turn the hue of an RGB image by a share of the circle: a third makes green of red."""
    hue, saturation, value = image.convert("HSV").split()
    turned = Image.fromarray(np.asarray(hue) + np.uint8(round(share * 256) % 256))
    return Image.merge("HSV", (turned, saturation, value)).convert("RGB")
