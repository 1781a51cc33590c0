"""Makes JPEGs of noise, and reads and prepares archives of images."""

from __future__ import annotations

import io
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from PIL import Image

from pipelines.images.archives import ImageSample, list_image_archives, read_samples
from pipelines.images.captions import CaptionFile
from pipelines.images.manifest import ImageManifest
from pipelines.images.prepare import IndexTask, PrepareImagesConfig, check_source
from pipelines.problems import Problem

Members = Iterable[tuple[str, bytes]]


def jpeg(seed: int = 0, size: tuple[int, int] = (20, 16)) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG")
    return buffer.getvalue()


def read(path: Path, data: bytes, captions: CaptionFile | None = None) -> tuple[list[ImageSample], list[Problem]]:
    path.write_bytes(data)
    (archive,) = list_image_archives(str(path))
    items = list(read_samples(str(path), archive, captions))
    return [i for i in items if isinstance(i, ImageSample)], [i for i in items if isinstance(i, Problem)]


def prepare(source: Path, directory: Path, captions: str = "") -> ImageManifest:
    """Do what pipelines.images.prepare does, without Ray and into a directory of this name."""
    directory.mkdir()
    config = PrepareImagesConfig(source=str(source), captions=captions)
    task = IndexTask(config=config, archives=check_source(config)[0], directory=str(directory))
    return task.finish([task.run(number) for number in range(len(task.archives))])
