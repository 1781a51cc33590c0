"""Measuring the pairs of a window in its galleries, in both directions: profiles, scalars of the scores, embeddings.

With unit vectors x_i of images and y_j of captions, and unit τ₀, the scores are s_ij = ⟨x_i, y_j⟩/τ₀. Pair j, of image i, is

    image → text    a query x_i, whose candidates are caption j and the captions of all other images of the gallery
    text → image    a query y_j, whose candidates are all images of the gallery

and the cross-entropy is −log softmax(s)_j, or _i. It is CLIP's (Radford et al. 2021, section 2.3) with a gallery as the
batch, except that other captions of an image are not its negatives (as in `tempnet.contrastive.retrieval.cross_entropy`).

Shapes: n images and t captions of a window, m images and c captions of a gallery, q queries, d size of an embedding.

Images are dealt out to galleries at random within windows of consecutive images, so that embeddings are read once, and a
window at a time, however many there are. A window has the images of eight galleries, the last one up to as many more:
data that are sorted by subject are mixed within it, not beyond. Every gallery has the same number of images, so that
cross-entropies can be compared: the last gallery of a window is filled up with images of its first ones, which are only
candidates there.

Everything is a pure function of the number of images, the size of a gallery and a seed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from jobs.scoring.headroom.tables import measured_table
from jobs.scoring.units import Finished, part_file, to_parquet
from tempnet.contrastive.retrieval import cross_entropy
from tempnet.headroom.features import Tokens
from tempnet.headroom.profile import Profiles

DIRECTIONS = ("image_to_text", "text_to_image")
# Maximum number of scores held in float64 at a time (32 MiB); a profile needs four copies.
_NUM_SCORES_AT_ONCE = 1 << 22
GALLERIES_PER_WINDOW = 8
# Keeps these random generators distinct from others that are keyed by a seed and a number.
_STREAM = 0x67616C6C
# From 2⁻¹⁰ to 2⁶, because cosines lie in [−1, 1]: below, all of softmax is on the best candidate, above, it is uniform.
CANDIDATES = tuple(2.0 ** (number / 2) for number in range(-20, 13))


@dataclass(frozen=True, slots=True)
class ImageRange:
    """Consecutive images that are measured and written as a unit."""

    number: int
    first: int
    stop: int
    """The window has the images first … stop − 1."""

    def file(self, direction: str) -> str:
        """Returns the name of the table of a direction."""
        return part_file(DIRECTIONS.index(direction), self.number)


@dataclass(frozen=True, slots=True)
class Gallery:
    """Images of a window that are candidates for each other's captions."""

    images: np.ndarray
    """(m,) places of the images in their window."""
    num_queries: int
    """The first of the images have this gallery as theirs; the others only fill it up."""


def windows(num_images: int, gallery_images: int) -> list[ImageRange]:
    """Returns the windows of a data set in order; a rest that would be shorter than a window belongs to the last one."""
    size = GALLERIES_PER_WINDOW * gallery_images
    bounds = [*range(0, max(1, num_images // size) * size, size), num_images]
    return [ImageRange(number, first, stop) for number, (first, stop) in enumerate(itertools.pairwise(bounds))]


def galleries(window: ImageRange, gallery_images: int, seed: int) -> list[Gallery]:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedWindow:
    """A window with the embeddings of its pairs."""

    window: ImageRange
    images: np.ndarray
    """(n, d) unit rows, float32."""
    texts: np.ndarray
    """(t, d) unit rows, float32."""
    owners: np.ndarray
    """(t,) place in the window of the image that each caption belongs to."""


class WindowMeasurer:
    """Makes the tables of a window, in a worker: one for each direction, with a row for every pair, in order.

    Args:
        unit_tau: temperature τ₀ that scores are divided by.
        gallery_images: number of images of a gallery.
        seed: seed of the galleries.
    """

    def __init__(self, *, unit_tau: float, gallery_images: int, seed: int) -> None:
        self._unit_tau, self._gallery_images, self._seed = unit_tau, gallery_images, seed

    def __call__(self, embedded: EmbeddedWindow) -> Finished:
        """Make the tables of a window."""
        num_images = len(embedded.images)
        files = {
            embedded.window.file(name): to_parquet(measured_table(tokens, embedded.owners, num_documents=num_images))
            for name, tokens in self.measure(embedded).items()
        }
        return Finished(files=files, num_cases=len(embedded.owners))

    @torch.inference_mode()
    def measure(self, embedded: EmbeddedWindow) -> dict[str, Tokens]:
        """Returns, for each direction, what is known of all pairs of a window, in order."""
        images, texts = (torch.from_numpy(rows).double() for rows in (embedded.images, embedded.texts))
        owners = torch.from_numpy(embedded.owners.astype(np.int64))
        found: dict[str, list[Tokens]] = {name: [] for name in DIRECTIONS}
        pairs: list[Tensor] = []
        for gallery in galleries(embedded.window, self._gallery_images, self._seed):
            scene = _Scene(images / self._unit_tau, texts, owners, gallery)
            pairs.append(scene.pairs)
            found["image_to_text"] += _measure(scene.image_to_text, scene, images[owners[scene.pairs]])
            found["text_to_image"] += _measure(scene.text_to_image, scene, texts[scene.pairs])
        order = torch.cat(pairs).argsort()
        return {name: Tokens.join(parts, order) for name, parts in found.items()}


class _Scene:
    """A gallery with its scores; `pairs` (q,) are the captions, by their place in the window, whose gallery it is."""

    def __init__(self, images: Tensor, texts: Tensor, owners: Tensor, gallery: Gallery) -> None:
        chosen = torch.from_numpy(gallery.images)
        place = torch.full((len(images),), -1).index_put((chosen,), torch.arange(len(chosen)))
        captions = (place[owners] >= 0).nonzero().squeeze(-1)
        self._images, self._texts = images[chosen], texts[captions]
        self._owners = place[owners[captions]]  # (c,) place in the gallery of each caption's image
        self._queries = (self._owners < gallery.num_queries).nonzero().squeeze(-1)  # places among the captions
        self.pairs = captions[self._queries]
        self.num_candidates = max(len(chosen), len(captions))

    def image_to_text(self, chunk: slice) -> tuple[Tensor, Tensor]:
        """Return the scores (q, c) of all captions for the images of some pairs, and the places (q,) of their captions."""
        queries = self._queries[chunk]
        owners = self._owners[queries]
        scores = self._images[owners] @ self._texts.T
        others = self._owners == owners.unsqueeze(-1)
        others[torch.arange(len(queries)), queries] = False
        return scores.masked_fill_(others, -torch.inf), queries

    def text_to_image(self, chunk: slice) -> tuple[Tensor, Tensor]:
        """Return the scores (q, m) of all images for the captions of some pairs, and the places (q,) of their images."""
        queries = self._queries[chunk]
        return self._texts[queries] @ self._images.T, self._owners[queries]


def _measure(scores: Callable[[slice], tuple[Tensor, Tensor]], scene: _Scene, hidden: Tensor) -> list[Tokens]:
    """Return what is known of the queries of a gallery, whose embeddings (q, d) are given, in chunks."""
    size = max(1, _NUM_SCORES_AT_ONCE // scene.num_candidates)
    found = []
    for start in range(0, len(hidden), size):
        chunk = slice(start, start + size)
        logits, targets = scores(chunk)
        profiles = Profiles.of_logits(logits, targets)
        top = logits.topk(2, dim=-1).values
        found.append(Tokens(profiles, top[:, 0] - top[:, 1], top[:, 0], hidden[chunk]))
    return found


def find_unit_tau(embedded: EmbeddedWindow, gallery_images: int, seed: int) -> float:
    """Returns the one of `CANDIDATES` with the lowest cross-entropy in the first gallery, both directions together.

    A profile covers 8 times less to 8 times more, in which the best constant is then found exactly. Because the
    candidates are far apart, rounding in the embeddings does not change the choice from one machine to another.
    """
    gallery = galleries(embedded.window, gallery_images, seed)[0]
    place = torch.full((len(embedded.images),), -1)
    place[gallery.images] = torch.arange(len(gallery.images))
    owners = place[embedded.owners]
    is_inside = owners >= 0
    image, text = torch.tensor(embedded.images)[gallery.images], torch.tensor(embedded.texts)[is_inside]

    def loss(tau: float) -> float:
        return cross_entropy(image, text, owners[is_inside], (torch.tensor([tau]), torch.tensor([tau])))

    return min(CANDIDATES, key=loss)
