"""Access to the images of a data set by number, as input to a model; damaged images are reported.

Shapes: n images, S side of the image.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from transformers import PreTrainedTokenizerFast

from jobs.scoring.dual_encoders.folders import ClassFolders
from pipelines.images.archives import MAX_IMAGE_BYTES
from pipelines.images.decoding import ImageError
from pipelines.images.manifest import ImageManifest
from pipelines.images.pairs import PairSource
from pipelines.images.views import evaluation_view


class ImageSet(Protocol):
    """Images with the numbers 0 … num_images − 1."""

    @property
    def num_images(self) -> int: ...

    @property
    def digest(self) -> str:
        """Digest that differs if the images or their order differ."""

    def read(self, numbers: Sequence[int], image_size: int) -> Iterator[np.ndarray | ImageProblem]:
        """Yields, for each number, the image as uint8 (S, S, 3), or the reason why it cannot be used."""


@dataclass(frozen=True, slots=True)
class ImageProblem:
    """An image that cannot be used."""

    text: str
    """Name of the image, and the reason why it cannot be used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderImages:
    """The images of class folders."""

    folders: ClassFolders
    max_pixels: int

    @property
    def num_images(self) -> int:
        return self.folders.num_images

    @property
    def digest(self) -> str:
        return self.folders.digest

    def read(self, numbers: Sequence[int], image_size: int) -> Iterator[np.ndarray | ImageProblem]:
        for number, data in zip(numbers, self.folders.read_bytes(numbers), strict=True):
            if len(data) > MAX_IMAGE_BYTES:
                yield ImageProblem(f"{self.folders.names[number]} (longer than {MAX_IMAGE_BYTES} bytes)")
                continue
            try:
                yield evaluation_view(data, image_size, max_pixels=self.max_pixels)
            except ImageError as error:
                yield ImageProblem(f"{self.folders.names[number]} ({error.kind}: {error})")


@dataclass(frozen=True, slots=True, kw_only=True)
class PairImages:
    """The images of a prepared image–text data set. All are readable, since preparation left out the others."""

    manifest: ImageManifest
    tokenizer: PreTrainedTokenizerFast

    @property
    def num_images(self) -> int:
        return self.manifest.num_images

    @property
    def digest(self) -> str:
        return self.manifest.digest

    def source(self, image_size: int) -> PairSource:
        """Returns a source that reads the images at a size."""
        return PairSource(manifest=self.manifest, tokenizer=self.tokenizer, image_size=image_size)

    def read(self, numbers: Sequence[int], image_size: int) -> Iterator[np.ndarray | ImageProblem]:
        yield from self.source(image_size).read_images(numbers)


def read_images(images: ImageSet, numbers: Sequence[int], image_size: int) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Read images by number.

    Returns:
        the usable images as uint8 (n, S, S, 3), their numbers (n,), and a description of each unusable image.
    """
    kept, views, problems = [], [], []
    for number, view in zip(numbers, images.read(numbers, image_size), strict=True):
        if isinstance(view, ImageProblem):
            problems.append(view.text)
        else:
            kept.append(number)
            views.append(view)
    shape = (0, image_size, image_size, 3)
    return np.stack(views) if views else np.empty(shape, np.uint8), np.array(kept, dtype=np.int64), problems
