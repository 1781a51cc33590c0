"""From the bytes of an image file to RGB, within limits that are checked before anything is decoded.

Formats are told by content, never by name. Alpha is laid over white (as img2dataset does), 16 bits are scaled to 8, an
animation is its first frame, and an image is turned as its EXIF orientation says.
"""

from __future__ import annotations

import io
from enum import StrEnum

import numpy as np
from PIL import ExifTags, Image

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
"""What is decoded; every further plug-in of Pillow's would be one more parser of untrusted bytes."""

MAX_PIXELS = 2**26
"""Default limit: 67 million pixels, 268 MB as Pillow holds RGB."""
# Pillow itself refuses twice its MAX_IMAGE_PIXELS.
LARGEST_MAX_PIXELS = 2 * 89_478_485
MAX_DECODING_BYTES = 10 * 2**26
"""Memory that decoding an image and converting it to RGB may take (640 MiB): an RGB JPEG of MAX_PIXELS just fits. With the
file's own bytes and the interpreter, a process that reads images stays below 1 GB."""

# Memory at the peak for each pixel of the decoded image: Pillow holds RGB, RGBA and CMYK in 4 bytes, and an image is
# converted while its source still exists. A JPEG may be progressive, so that libjpeg keeps 2 bytes for each coefficient;
# libwebp keeps two canvases, and Pillow two copies; libtiff decodes a whole strip or tile, of up to 8 bytes a pixel.
_BYTES_PER_PIXEL = {"JPEG": 10, "MPO": 10, "PNG": 8, "GIF": 8, "BMP": 8, "WEBP": 20, "TIFF": 16}
_BYTES_PER_PIXEL_OF_CMYK = 12
# Pillow keeps a pointer to every line, in the image, in its conversion, and in what it is turned into.
_BYTES_PER_LINE = 24
_TIFF_TILE_WIDTH, _TIFF_TILE_LENGTH = 322, 323

_TRANSPOSITIONS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""EXIF orientation → what turns the stored image upright; 1 needs nothing, and other numbers mean nothing."""
_FIRST_SWAPPING = 5  # from here on width and height change places

_LINES_AT_A_TIME = 256


class ImageProblemKind(StrEnum):
    """Everything that can be wrong with the bytes of one image."""

    EMPTY_IMAGE = "empty_image"
    CORRUPT_IMAGE = "corrupt_image"
    TOO_MANY_PIXELS = "too_many_pixels"
    TOO_MUCH_MEMORY = "too_much_memory"
    """Decoding it would take more than MAX_DECODING_BYTES."""


class ImageError(Exception):
    """An image that cannot be used."""

    def __init__(self, kind: ImageProblemKind, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind


def open_image(data: bytes, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """The image, of which only the header has been read.

    Raises:
        ImageError: if there are no bytes, they are no image, it has more than `max_pixels` pixels, or decoding it would
            take more than MAX_DECODING_BYTES.
    """
    if not data:
        raise ImageError(ImageProblemKind.EMPTY_IMAGE, "the file has 0 bytes")
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
        num_bytes = decoding_bytes(image)
    except Image.DecompressionBombError as error:
        raise ImageError(ImageProblemKind.TOO_MANY_PIXELS, str(error)) from error
    except Exception as error:  # Pillow's plug-ins raise whatever their parsing ran into
        raise ImageError(ImageProblemKind.CORRUPT_IMAGE, "no image of a known format, or a broken header") from error
    width, height = image.size
    if width * height > max_pixels:
        detail = f"{width} × {height} pixels; the limit is {max_pixels}"
        raise ImageError(ImageProblemKind.TOO_MANY_PIXELS, detail)
    if num_bytes > MAX_DECODING_BYTES:
        detail = (
            f"decoding {width} × {height} pixels of {image.format} in mode {image.mode} may take {num_bytes >> 20} MiB; "
            f"the limit is {MAX_DECODING_BYTES >> 20}"
        )
        raise ImageError(ImageProblemKind.TOO_MUCH_MEMORY, detail)
    return image


def decoding_bytes(image: Image.Image) -> int:
    """An upper bound of the memory that decoding an opened image and converting it to RGB takes, from its header alone."""
    width, height = image.size
    num_pixels = width * height
    if image.format == "TIFF":  # A tile is decoded whole, however little of it is in the image.
        tags = image.tag_v2  # type: ignore[attr-defined]
        num_pixels = max(num_pixels, int(tags.get(_TIFF_TILE_WIDTH, 1)) * int(tags.get(_TIFF_TILE_LENGTH, 1)))
    bytes_per_pixel = _BYTES_PER_PIXEL[image.format or ""]
    if image.mode == "CMYK":
        bytes_per_pixel = max(bytes_per_pixel, _BYTES_PER_PIXEL_OF_CMYK)
    return num_pixels * bytes_per_pixel + max(width, height) * _BYTES_PER_LINE


def to_rgb(image: Image.Image) -> Image.Image:
    """Decode, convert and turn upright. The image that is given is used up: its memory is released.

    Raises:
        ImageError: if the data are cut or corrupt.
    """
    _load(image)
    turn = _TRANSPOSITIONS.get(_orientation(image))
    try:
        rgb = _converted(image)
        return rgb if turn is None else _replaced(rgb, rgb.transpose(turn))
    except Exception as error:
        raise _corrupt(error) from error


def upright_size(image: Image.Image) -> tuple[int, int]:
    """(width, height) that `to_rgb` will give. A JPEG's header says it; any other image is decoded for it.

    Raises:
        ImageError: as `to_rgb`.
    """
    if image.format not in ("JPEG", "MPO"):
        _load(image)
    width, height = image.size
    return (height, width) if _orientation(image) >= _FIRST_SWAPPING else (width, height)


def check_image(data: bytes, max_pixels: int = MAX_PIXELS) -> None:
    """Decode an image as cheaply as finds every error (a JPEG at an eighth of its size, which still reads all of it).

    Raises:
        ImageError: as `open_image` and `to_rgb`.
    """
    image = open_image(data, max_pixels)
    shrink_on_load(image, (1, 1))
    to_rgb(image)


def shrink_on_load(image: Image.Image, size: tuple[int, int]) -> None:
    """Let a JPEG be decoded at ½, ¼ or ⅛ of its size, as long as it stays at least `size` when it is upright.

    Does nothing to any other image, or to one that has been decoded.
    """
    width, height = size
    image.draft(None, (height, width) if _orientation_of_header(image) >= _FIRST_SWAPPING else size)  # None: same mode


def _load(image: Image.Image) -> None:
    try:
        image.load()
    except Exception as error:
        raise _corrupt(error) from error


def _orientation(image: Image.Image) -> int:
    """1 … 8, of an image that is a JPEG or has been decoded (a PNG may say it behind its pixels)."""
    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:  # Pillow raises whatever its parsing of broken metadata ran into; the pixels may be good
        return 1
    return orientation if orientation in _TRANSPOSITIONS else 1


def _orientation_of_header(image: Image.Image) -> int:
    return _orientation(image) if image.format in ("JPEG", "MPO") else 1


def _converted(image: Image.Image) -> Image.Image:
    """A decoded image as RGB; releases the image unless it is that already."""
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode == "F":
        raise ValueError("its values are floating-point numbers of an unknown range")
    if image.mode.startswith("I"):
        return _from_16_bits(image)
    if not image.has_transparency_data:
        return _replaced(image, image.convert("RGB"))
    if image.mode not in ("RGBA", "LA"):
        image = _replaced(image, image.convert("RGBA"))
    rgb = Image.new("RGB", image.size, (255, 255, 255))
    rgb.paste(image, mask=image)
    return _replaced(image, rgb)


def _from_16_bits(image: Image.Image) -> Image.Image:
    """Grey values 0 … 65 535 → 0 … 255, rounded; `Image.convert` would clip them."""
    grey = np.empty((image.height, image.width), dtype=np.uint8)
    for top in range(0, image.height, _LINES_AT_A_TIME):
        bottom = min(top + _LINES_AT_A_TIME, image.height)
        values = np.asarray(image.crop((0, top, image.width, bottom))).astype(np.int64).clip(0, 65_535)
        grey[top:bottom] = (values * 255 + 32_767) // 65_535
    return _replaced(image, Image.fromarray(grey).convert("RGB"))


def _replaced(image: Image.Image, replacement: Image.Image) -> Image.Image:
    """The replacement; the image's memory is released, whoever still has a reference to it."""
    image.close()
    return replacement


def _corrupt(error: Exception) -> ImageError:
    return ImageError(ImageProblemKind.CORRUPT_IMAGE, str(error) or type(error).__name__)
