"""Makes JPEGs of noise and tars, and reads and prepares archives of images."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from PIL import Image

from pipelines.images.archives import list_image_archives, read_samples
from pipelines.images.assembly import assemble
from pipelines.images.caption_files import CaptionFile
from pipelines.images.decoding import MAX_PIXELS
from pipelines.images.index import index_archive, index_name
from pipelines.images.manifest import ImageManifest
from pipelines.images.samples import ImageSample
from pipelines.problems import Problem

Members = Iterable[tuple[str, bytes]]


def jpeg(seed: int = 0, size: tuple[int, int] = (20, 16)) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG")
    return buffer.getvalue()


def tar(members: Members) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as file:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            file.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def read(path: Path, data: bytes, captions: CaptionFile | None = None) -> tuple[list[ImageSample], list[Problem]]:
    path.write_bytes(data)
    (archive,) = list_image_archives(str(path))
    items = list(read_samples(str(path), archive, captions))
    return [i for i in items if isinstance(i, ImageSample)], [i for i in items if isinstance(i, Problem)]


def prepare(source: Path, directory: Path, captions: CaptionFile | None = None) -> ImageManifest:
    """Do what pipelines.images.prepare does, without Ray."""
    directory.mkdir()
    entries = [
        index_archive(str(source), archive, captions, max_pixels=MAX_PIXELS, index=f"{directory}/{index_name(number)}")
        for number, archive in enumerate(list_image_archives(str(source)))
    ]
    return assemble(
        entries, captions, directory=str(directory), source=str(source), captions_uri="c.json", max_pixels=MAX_PIXELS
    )
