"""Tests of decoding and views: Pillow and plain arithmetic are the references."""

from __future__ import annotations

import colorsys
import io
import time
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import ExifTags, Image, ImageOps
from PIL.PngImagePlugin import PngInfo
from transformers import CLIPImageProcessorPil

from pipelines.images.decoding import ImageError, check_image, open_image, to_rgb
from pipelines.images.views import (
    OPERATIONS,
    AugmentationConfig,
    evaluation_view,
    rand_augment,
    random_crop,
    training_view,
    turn_hue,
)
from pipelines.problems import ProblemKind


def encode(image: Image.Image, form: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def smooth(width: int, height: int) -> Image.Image:
    """Return an image without detail, so that all ways of decoding and resizing agree."""
    x, y = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    return Image.fromarray(np.stack([x, y, 255 - x], axis=-1).astype(np.uint8))


def decode(data: bytes) -> np.ndarray:
    return np.asarray(to_rgb(open_image(data)))


@pytest.mark.parametrize("add", [PngInfo.add_text, PngInfo.add_itxt])
def test_texts_and_profiles_of_any_size_are_not_read(add: Callable[..., None]) -> None:
    info = PngInfo()
    add(info, "XML:com.adobe.xmp", "y" * 3_000_000, zip=True)
    profile = np.random.default_rng(0).bytes(2**19) + bytes(2**20)
    image = smooth(8, 6)
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    for keep in ({}, {"exif": exif}):
        data = encode(image, pnginfo=info, icc_profile=profile, **keep)
        check_image(data)
        assert np.array_equal(decode(data), decode(encode(image, **keep)))


def test_a_jpeg_of_many_scans_is_refused_before_it_is_decoded_and_what_is_no_image_is_named() -> None:
    data = encode(Image.new("RGB", (4000, 4000)), "JPEG", progressive=True)
    check_image(data)
    scan = data[data.rindex(b"\xff\xda") : -2]
    started = time.monotonic()
    with pytest.raises(ImageError, match=r"1010 scans of 4000 × 4000 pixels; the limit is 83") as caught:
        check_image(data[:-2] + scan * 1000 + data[-2:])
    assert caught.value.kind is ProblemKind.TOO_MANY_SCANS
    assert time.monotonic() - started < 1
    with pytest.raises(ImageError, match=r"no JPEG, PNG, .* it begins with b'<html>"):
        check_image(b"<html>not found")
    with pytest.raises(ImageError, match=r"4000 × 4000 pixels; the limit is 15999999"):
        check_image(data, 4000 * 4000 - 1)


# ---- modes -----------------------------------------------------------------------------------------------------------


def test_grey_of_16_bits_is_scaled_and_not_clipped() -> None:
    values = np.linspace(0, 65_535, 64 * 8).astype(np.uint16).reshape(8, 64)
    decoded = decode(encode(Image.fromarray(values)))
    assert np.array_equal(decoded, np.rint(values / 257.0).astype(np.uint8)[..., None].repeat(3, axis=-1))


def test_alpha_is_laid_over_white() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (9, 7, 4), dtype=np.uint8)
    share = pixels[..., 3:] / 255
    expected = pixels[..., :3] * share + 255 * (1 - share)
    assert np.abs(decode(encode(Image.fromarray(pixels))) - expected).max() <= 1
    grey = Image.merge("LA", [Image.fromarray(pixels[..., 0]), Image.fromarray(pixels[..., 3])])
    assert np.abs(decode(encode(grey)) - (pixels[..., :1] * share + 255 * (1 - share))).max() <= 1


def test_a_transparent_colour_becomes_white() -> None:
    palette = Image.new("P", (4, 4), 1)
    palette.putpalette([10, 20, 30, 200, 100, 50])
    palette.putpixel((0, 0), 0)
    assert decode(encode(palette))[0, 0].tolist() == [10, 20, 30]
    for form in ("PNG", "GIF"):
        decoded = decode(encode(palette, form, transparency=0))
        assert (decoded[0, 0].tolist(), decoded[1, 1].tolist()) == ([255, 255, 255], [200, 100, 50])
    assert decode(encode(Image.new("RGB", (2, 2), (1, 2, 3)), transparency=(1, 2, 3))).min() == 255


# ---- orientation -----------------------------------------------------------------------------------------------------

# What EXIF's table says of row 0 and column 0, for stored pixels (rows, columns, 3) → upright ones.
ORIENTATIONS: dict[int, Callable[[np.ndarray], np.ndarray]] = {
    1: lambda pixels: pixels,
    2: lambda pixels: pixels[:, ::-1],
    3: lambda pixels: pixels[::-1, ::-1],
    4: lambda pixels: pixels[::-1],
    5: lambda pixels: pixels.transpose(1, 0, 2),
    6: lambda pixels: pixels[::-1].transpose(1, 0, 2),
    7: lambda pixels: pixels[::-1, ::-1].transpose(1, 0, 2),
    8: lambda pixels: pixels[:, ::-1].transpose(1, 0, 2),
}


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", ORIENTATIONS)
def test_an_image_is_turned_upright_before_it_is_cropped(orientation: int, form: str) -> None:
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 64, 3), dtype=np.uint8))
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    options = {"lossless": True} if form == "WEBP" else {}
    data = encode(noise, form, exif=exif, **options)
    stored = np.asarray(Image.open(io.BytesIO(encode(noise, form, **options))).convert("RGB"))
    upright = encode(Image.fromarray(np.ascontiguousarray(ORIENTATIONS[orientation](stored))))
    check_image(data)
    assert np.array_equal(decode(data), decode(upright))
    assert np.array_equal(evaluation_view(data, 24), evaluation_view(upright, 24))
    for seed in range(2):  # so large that a JPEG is not shrunk while it is decoded
        views = (training_view(file, 64, AugmentationConfig(), np.random.default_rng(seed)) for file in (data, upright))
        assert np.array_equal(*views)


# ---- what is refused -------------------------------------------------------------------------------------------------


JPEG = encode(smooth(64, 48), "JPEG")
PNG = encode(smooth(64, 48))

REFUSED = {
    "0 bytes": b"",
    "html": b"<html>not found</html>",
    "cut JPEG": JPEG[: len(JPEG) // 2],
    "cut PNG": PNG[: len(PNG) // 2],
    "a byte of a PNG": PNG[:60] + bytes([PNG[60] ^ 255]) + PNG[61:],
    "PPM": encode(smooth(4, 4), "PPM"),
    "TIFF of floats": encode(Image.new("F", (4, 4), 0.5), "TIFF"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_images_are_refused_by_kind(name: str) -> None:
    with pytest.raises(ImageError) as caught:
        check_image(REFUSED[name])
    assert caught.value.kind is (ProblemKind.CORRUPT_IMAGE if REFUSED[name] else ProblemKind.EMPTY_IMAGE)


# ---- views -----------------------------------------------------------------------------------------------------------


@given(
    st.integers(1, 2000),
    st.integers(1, 2000),
    st.floats(0.01, 1.0),
    st.integers(0, 2**32),
)
def test_crops_lie_inside_the_image(width: int, height: int, min_scale: float, seed: int) -> None:
    augmentation = AugmentationConfig(min_scale=min_scale)
    left, top, right, bottom = random_crop(width, height, augmentation, np.random.default_rng(seed))
    assert 0 <= left < right <= width
    assert 0 <= top < bottom <= height


def test_crops_cover_the_scales_ratios_and_places_that_are_asked_for() -> None:
    augmentation, rng = AugmentationConfig(), np.random.default_rng(0)
    boxes = np.array([random_crop(640, 480, augmentation, rng) for _ in range(4000)])
    width, height = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    share, ratio = width * height / (640 * 480), width / height
    assert share.min() > 0.49
    assert 0.745 < ratio.min() < 0.78
    assert 1.28 < ratio.max() < 1.34
    room = width < 600
    assert abs((boxes[room, 0] / (640 - width[room])).mean() - 0.5) < 0.02


@pytest.mark.parametrize("orientation", [1, 6])
def test_shrinking_while_decoding_a_jpeg_changes_little(orientation: int) -> None:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    data = encode(smooth(512, 384), "JPEG", quality=95, exif=exif)
    lossless, crop = encode(ImageOps.exif_transpose(Image.open(io.BytesIO(data)))), AugmentationConfig()
    for seed in range(6):
        view = training_view(data, 40, crop, np.random.default_rng(seed))
        full = training_view(lossless, 40, crop, np.random.default_rng(seed))
        assert np.abs(view.astype(int) - full).max() <= 6


def test_half_of_the_views_are_flipped_and_the_whole_is_what_pillow_resizes_it_to() -> None:
    image, whole = smooth(96, 96), AugmentationConfig(min_scale=1.0)
    plain = np.asarray(image.resize((24, 24), Image.Resampling.BICUBIC))
    is_flipped = []
    for seed in range(200):
        view = training_view(encode(image), 24, whole, np.random.default_rng(seed))
        is_flipped.append(not np.array_equal(view, plain))
        assert np.abs(view - (plain[:, ::-1] if is_flipped[-1] else plain).astype(int)).max() <= is_flipped[-1]
    assert 70 < sum(is_flipped) < 130


@pytest.mark.parametrize("size", [(30, 50), (7, 9), (300, 1), (61, 35)])
def test_evaluation_takes_the_centre_that_the_processor_of_an_export_takes(size: tuple[int, int]) -> None:
    image = smooth(*size)
    edges = {"size": {"shortest_edge": 24}, "crop_size": {"height": 24, "width": 24}}
    processor = CLIPImageProcessorPil(**edges, do_rescale=False, do_normalize=False)
    (expected,) = processor(image, return_tensors="np")["pixel_values"]
    assert np.array_equal(evaluation_view(encode(image), 24), expected.transpose(1, 2, 0))


def test_rand_augment_is_a_function_of_the_generator_and_does_nothing_at_magnitude_0() -> None:
    image = smooth(32, 24)
    first, second, other = (np.asarray(rand_augment(image, 4, 8, np.random.default_rng(seed))) for seed in (3, 3, 4))
    assert np.array_equal(first, second)
    assert not np.array_equal(first, other)
    for name, operation in OPERATIONS.items():
        assert operation(image, 0.7).size == image.size
        if name not in ("auto_contrast", "equalise"):  # these have no strength
            assert np.array_equal(np.asarray(operation(image, 0.0)), np.asarray(image)), name
    dot = Image.new("RGB", (100, 100))
    dot.putpixel((50, 50), (255, 255, 255))
    shifted = np.asarray(OPERATIONS["shift_x"](dot, 0.2))[..., 0] == 255
    assert np.argwhere(shifted).tolist() == [[50, 41]]


def test_hues_are_turned_as_colorsys_turns_them_and_grey_views_have_no_colour() -> None:
    image = smooth(20, 20)
    found = np.asarray(turn_hue(image, 0.2)) / 255
    for place in np.ndindex(20, 20):
        hue, saturation, value = colorsys.rgb_to_hsv(*np.asarray(image)[place] / 255)
        np.testing.assert_allclose(found[place], colorsys.hsv_to_rgb(hue + 0.2, saturation, value), atol=0.05)
    data, rng = encode(image), np.random.default_rng(0)
    grey = training_view(data, 16, AugmentationConfig(grey_probability=1.0), rng)
    assert (grey == grey[..., :1]).all()
    views = [training_view(data, 16, AugmentationConfig(colour_jitter=0.5), np.random.default_rng(1)) for _ in range(2)]
    assert np.array_equal(*views)
    plain = training_view(data, 16, AugmentationConfig(), np.random.default_rng(1))
    assert not np.array_equal(views[0], plain)
