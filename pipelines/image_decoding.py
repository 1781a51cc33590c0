"""From the bytes of an image file to RGB, within limits that are checked before anything is decoded.

Formats are told by content, never by name. Alpha is laid over white (as img2dataset does), 16 bits are scaled to 8, an
animation is its first frame.
"""

from __future__ import annotations

import io
from enum import StrEnum

import numpy as np
from PIL import Image

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
"""What is decoded; every further plug-in of Pillow's would be one more parser of untrusted bytes."""

MAX_PIXELS = 2**26
"""Default limit: 67 million pixels, 201 MB as RGB."""
# Pillow itself refuses twice its MAX_IMAGE_PIXELS.
LARGEST_MAX_PIXELS = 2 * 89_478_485


class ImageProblemKind(StrEnum):
    """Everything that can be wrong with the bytes of one image."""

    EMPTY_IMAGE = "empty_image"
    CORRUPT_IMAGE = "corrupt_image"
    TOO_MANY_PIXELS = "too_many_pixels"


class ImageError(Exception):
    """An image that cannot be used."""

    def __init__(self, kind: ImageProblemKind, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind


def open_image(data: bytes, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """The image, of which only the header has been read.

    Raises:
        ImageError: if there are no bytes, they are no image, or it has more than `max_pixels` pixels.
    """
    if not data:
        raise ImageError(ImageProblemKind.EMPTY_IMAGE, "the file has 0 bytes")
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except Image.DecompressionBombError as error:
        raise ImageError(ImageProblemKind.TOO_MANY_PIXELS, str(error)) from error
    except Exception as error:  # Pillow's plug-ins raise whatever their parsing ran into
        raise ImageError(ImageProblemKind.CORRUPT_IMAGE, "no image of a known format, or a broken header") from error
    width, height = image.size
    if width * height > max_pixels:
        detail = f"{width} × {height} pixels; the limit is {max_pixels}"
        raise ImageError(ImageProblemKind.TOO_MANY_PIXELS, detail)
    return image


def to_rgb(image: Image.Image) -> Image.Image:
    """Decode and convert.

    Raises:
        ImageError: if the data are cut or corrupt.
    """
    try:
        image.load()
        if image.mode == "RGB" and "transparency" not in image.info:
            return image
        if image.mode.startswith("I"):
            return _from_16_bits(image)
        if not image.has_transparency_data:
            return image.convert("RGB")
        pixels = image.convert("RGBA")
        white = Image.new("RGBA", pixels.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, pixels).convert("RGB")
    except Exception as error:
        raise ImageError(ImageProblemKind.CORRUPT_IMAGE, str(error) or type(error).__name__) from error


def check_image(data: bytes, max_pixels: int = MAX_PIXELS) -> None:
    """Decode an image as cheaply as finds every error (a JPEG at an eighth of its size, which still reads all of it).

    Raises:
        ImageError: as `open_image` and `to_rgb`.
    """
    image = open_image(data, max_pixels)
    shrink_on_load(image, (1, 1))
    to_rgb(image)


def shrink_on_load(image: Image.Image, size: tuple[int, int]) -> None:
    """Let a JPEG be decoded at ½, ¼ or ⅛ of its size, as long as it stays at least `size`; before it is loaded."""
    image.draft(None, size)  # None keeps the mode


def _from_16_bits(image: Image.Image) -> Image.Image:
    """Grey values 0 … 65 535 → 0 … 255, rounded; `Image.convert` would clip them."""
    values = np.asarray(image).astype(np.int64).clip(0, 65_535)
    return Image.fromarray(((values * 255 + 32_767) // 65_535).astype(np.uint8)).convert("RGB")
