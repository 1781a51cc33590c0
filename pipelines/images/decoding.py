"""Decode the bytes of an image file to RGB, within size limits that are checked before anything is decoded.

The format is determined from the content, never from the file name. Transparent images are composited over white (as
img2dataset does), 16-bit values are scaled to 8 bits, only the first frame of an animation is used, and an image is
rotated or flipped as its EXIF orientation says.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from PIL import ExifTags, Image

from pipelines.problems import ProblemKind

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
"""Formats that are decoded; the list is short because each further plug-in of Pillow also parses untrusted bytes."""

MAX_PIXELS = 2**26
"""Default limit on the number of pixels: 67 million, which Pillow stores as RGB in 268 MB."""
# Pillow itself refuses images of more than twice its MAX_IMAGE_PIXELS.
LARGEST_MAX_PIXELS = 2 * 89_478_485
MAX_DECODING_BYTES = 10 * 2**26
"""Maximum memory for decoding an image and converting it to RGB, in bytes (640 MiB).

An RGB JPEG of MAX_PIXELS pixels just fits. Including the file's own bytes and the interpreter, a process that reads
images stays below 1 GB.
"""

# Peak memory per pixel of the decoded image, in bytes. Pillow stores RGB, RGBA and CMYK in 4 bytes per pixel, and the
# source image still exists while it is converted. A JPEG may be progressive, in which case libjpeg keeps 2 bytes per
# coefficient. libwebp keeps two canvases, and Pillow two copies. libtiff decodes a whole strip or tile, with up to 8
# bytes per pixel.
_BYTES_PER_PIXEL = {"JPEG": 10, "MPO": 10, "PNG": 8, "GIF": 8, "BMP": 8, "WEBP": 20, "TIFF": 16}
_BYTES_PER_PIXEL_OF_CMYK = 12
# Pillow keeps a pointer to every line in each of three images: the original, its RGB conversion and the rotated result.
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
"""Mapping from EXIF orientation to the operation that turns the stored image upright.

Orientation 1 needs no operation, and other numbers have no meaning.
"""
_FIRST_SWAPPING = 5  # Orientations from this number on swap width and height.

_LINES_AT_A_TIME = 256

# Pixels times scans of a JPEG: a progressive one decodes every pixel again in each of its scans, of which a usual one has
# ten, and one in CMYK 18.
_MAX_SCANNED_PIXELS = 20 * MAX_PIXELS
_START_OF_SCAN = b"\xff\xda"

_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
# Chunks of a PNG with texts and colour profiles, which are compressed. Pillow refuses the whole image for one that has more
# than 1 MiB, and nothing here reads them.
_UNREAD_PNG_CHUNKS = (b"tEXt", b"zTXt", b"iTXt", b"iCCP")
_NUM_BYTES_SHOWN = 12


class ImageError(Exception):
    """Raised for an image that cannot be used; `kind` says why."""

    def __init__(self, kind: ProblemKind, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind


def open_image(data: bytes, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Open an image, reading only its header, and check its size."""
    if not data:
        raise ImageError(ProblemKind.EMPTY_IMAGE, "the file has 0 bytes")
    try:
        image = Image.open(io.BytesIO(_without_texts(data)), formats=FORMATS)
        num_bytes = estimate_decoding_bytes(image)
    except Image.DecompressionBombError as error:
        raise ImageError(ProblemKind.TOO_MANY_PIXELS, str(error)) from error
    except Image.UnidentifiedImageError as error:
        detail = f"no {', '.join(FORMATS)}, or a broken header; it begins with {data[:_NUM_BYTES_SHOWN]!r}"
        raise ImageError(ProblemKind.CORRUPT_IMAGE, detail) from error
    except Exception as error:  # Pillow's plug-ins let all kinds of exceptions escape from their parsers.
        raise ImageError(ProblemKind.CORRUPT_IMAGE, f"a broken header: {error}") from error
    width, height = image.size
    if width * height > max_pixels:
        detail = f"{width} × {height} pixels; the limit is {max_pixels}"
        raise ImageError(ProblemKind.TOO_MANY_PIXELS, detail)
    if num_bytes > MAX_DECODING_BYTES:
        detail = (
            f"decoding {width} × {height} pixels of {image.format} in mode {image.mode} may take {num_bytes >> 20} MiB; "
            f"the limit is {MAX_DECODING_BYTES >> 20}"
        )
        raise ImageError(ProblemKind.TOO_MUCH_MEMORY, detail)
    if image.format in ("JPEG", "MPO"):
        # Within the data of a scan, these bytes do not occur.
        num_scans = data.count(_START_OF_SCAN)
        if num_scans * width * height > _MAX_SCANNED_PIXELS:
            detail = f"{num_scans} scans of {width} × {height} pixels; the limit is {_MAX_SCANNED_PIXELS // (width * height)}"
            raise ImageError(ProblemKind.TOO_MANY_SCANS, detail)
    return image


def _without_texts(data: bytes) -> bytes:
    """Return a PNG without the chunks that nothing here reads; other files are returned unchanged."""
    if not data.startswith(_PNG_SIGNATURE):
        return data
    kept, first, position = [], 0, len(_PNG_SIGNATURE)
    while position + 12 <= len(data):
        end = position + 12 + int.from_bytes(data[position : position + 4], "big")
        if data[position + 4 : position + 8] in _UNREAD_PNG_CHUNKS:
            kept.append(data[first:position])
            first = end
        position = end
    return b"".join([*kept, data[first:]]) if kept else data


def estimate_decoding_bytes(image: Image.Image) -> int:
    """Bound, from the header alone, the memory in bytes for decoding an opened image and converting it to RGB."""
    width, height = image.size
    num_pixels = width * height
    if image.format == "TIFF":  # A tile is always decoded completely, even if most of it lies outside the image.
        tags = image.tag_v2  # type: ignore[attr-defined]
        num_pixels = max(num_pixels, int(tags.get(_TIFF_TILE_WIDTH, 1)) * int(tags.get(_TIFF_TILE_LENGTH, 1)))
    bytes_per_pixel = _BYTES_PER_PIXEL[image.format or ""]
    if image.mode == "CMYK":
        bytes_per_pixel = max(bytes_per_pixel, _BYTES_PER_PIXEL_OF_CMYK)
    return num_pixels * bytes_per_pixel + max(width, height) * _BYTES_PER_LINE


def to_rgb(image: Image.Image) -> Image.Image:
    """Decode an image, convert it to RGB and turn it upright; the image passed in is released."""
    with _corruption_named():
        image.load()
        turn = _TRANSPOSITIONS.get(_read_orientation(image))
        rgb = _convert_to_rgb(image)
        return rgb if turn is None else _replace(rgb, rgb.transpose(turn))


def upright_size(image: Image.Image) -> tuple[int, int]:
    """Return the (width, height) of the image that `to_rgb` will return; only the header of a JPEG is read."""
    if image.format not in ("JPEG", "MPO"):
        with _corruption_named():
            image.load()
    width, height = image.size
    return (height, width) if _read_orientation(image) >= _FIRST_SWAPPING else (width, height)


def check_image(data: bytes, max_pixels: int = MAX_PIXELS) -> None:
    """Raise ImageError if an image cannot be decoded, as cheaply as possible.

    A JPEG is decoded at an eighth of its size, which still reads all of its data and so finds every error.
    """
    image = open_image(data, max_pixels)
    shrink_on_load(image, (1, 1))
    to_rgb(image)


def shrink_on_load(image: Image.Image, size: tuple[int, int]) -> None:
    """Set a JPEG to be decoded at ½, ¼ or ⅛ of its size, no smaller than the upright (width, height) `size`."""
    if image.format in ("JPEG", "MPO"):
        # The first argument None keeps the mode.
        image.draft(None, size[::-1] if _read_orientation(image) >= _FIRST_SWAPPING else size)


@contextmanager
def _corruption_named() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # Pillow's plug-ins let all kinds of exceptions escape.
        raise ImageError(ProblemKind.CORRUPT_IMAGE, str(error) or type(error).__name__) from error


def _read_orientation(image: Image.Image) -> int:
    """Return the EXIF orientation, 1 … 8, of an image that is a JPEG or has been decoded.

    Other formats must be decoded first, because a PNG may store its orientation after its pixels.
    """
    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:  # Pillow raises all kinds of exceptions for broken metadata; the pixels may still be intact.
        return 1
    return orientation if orientation in _TRANSPOSITIONS else 1


def _convert_to_rgb(image: Image.Image) -> Image.Image:
    """Convert a decoded image to RGB and release its memory; return it unchanged if it is already RGB."""
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode == "F":
        raise ValueError("its values are floating-point numbers of an unknown range")
    if image.mode.startswith("I"):
        return _convert_16_bits(image)
    if not image.has_transparency_data:
        return _replace(image, image.convert("RGB"))
    if image.mode not in ("RGBA", "LA"):
        image = _replace(image, image.convert("RGBA"))
    rgb = Image.new("RGB", image.size, (255, 255, 255))
    rgb.paste(image, mask=image)
    return _replace(image, rgb)


def _convert_16_bits(image: Image.Image) -> Image.Image:
    """Scale grey values 0 … 65 535 to 0 … 255 with rounding, and convert to RGB; `Image.convert` would clip them."""
    grey = np.empty((image.height, image.width), dtype=np.uint8)
    for top in range(0, image.height, _LINES_AT_A_TIME):
        bottom = min(top + _LINES_AT_A_TIME, image.height)
        values = np.asarray(image.crop((0, top, image.width, bottom))).astype(np.int64).clip(0, 65_535)
        grey[top:bottom] = (values * 255 + 32_767) // 65_535
    return _replace(image, Image.fromarray(grey).convert("RGB"))


def _replace(image: Image.Image, replacement: Image.Image) -> Image.Image:
    """Release the image's memory, even if references to it remain, and return the replacement."""
    image.close()
    return replacement
