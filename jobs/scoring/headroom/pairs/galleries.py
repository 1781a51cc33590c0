"""Galleries: groups of images, with all their captions, among which images and captions are looked for.

Images are dealt out to galleries at random within windows of consecutive images, so that embeddings are read once, and a
window at a time, however many there are. A window has the images of eight galleries, the last one up to as many more:
data that are sorted by subject are mixed within it, not beyond. Every gallery has the same number of images, so that
cross-entropies can be compared: the last gallery of a window is filled up with images of its first ones, which are only
candidates there.

Everything is a pure function of the number of images, the size of a gallery and a seed.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

GALLERIES_PER_WINDOW = 8
# Keeps these random generators distinct from others that are keyed by a seed and a number.
_STREAM = 0x67616C6C


@dataclass(frozen=True, slots=True)
class Window:
    """Consecutive images that are measured and written as a unit."""

    number: int
    first: int
    stop: int
    """The window has the images first … stop − 1."""


@dataclass(frozen=True, slots=True)
class Gallery:
    """Images of a window that are candidates for each other's captions."""

    images: np.ndarray
    """(m,) places of the images in their window."""
    num_queries: int
    """The first of the images have this gallery as theirs; the others only fill it up."""


def windows(num_images: int, gallery_images: int) -> list[Window]:
    """Returns the windows of a data set in order; a rest that would be shorter than a window belongs to the last one."""
    size = GALLERIES_PER_WINDOW * gallery_images
    bounds = [*range(0, max(1, num_images // size) * size, size), num_images]
    return [Window(number, first, stop) for number, (first, stop) in enumerate(itertools.pairwise(bounds))]


def galleries(window: Window, gallery_images: int, seed: int) -> list[Gallery]:
    """Returns the galleries of a window; every image of it is a query of exactly one of them.

    Args:
        window: the window, of n images.
        gallery_images: number m of images of a gallery; n if the window has fewer.
        seed: seed of the random order of the images.
    """
    order = np.random.default_rng([seed, _STREAM, window.number]).permutation(window.stop - window.first)
    size = min(gallery_images, len(order))
    parts = [order[start : start + size] for start in range(0, len(order), size)]
    return [Gallery(np.concatenate([part, order[: size - len(part)]]), len(part)) for part in parts]
