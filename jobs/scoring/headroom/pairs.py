"""The predictions of an image–text model: prepared images → embeddings → galleries → tables, one for each direction.

With unit vectors x_i of images and y_j of captions, and unit τ₀, the scores are s_ij = ⟨x_i, y_j⟩/τ₀. Pair j, of image i, is

    image → text    a query x_i, whose candidates are caption j and the captions of all other images of the gallery
    text → image    a query y_j, whose candidates are all images of the gallery

and the cross-entropy is −log softmax(s)_j, or _i. It is CLIP's (Radford et al. 2021, section 2.3) with a gallery as the
batch, except that other captions of an image are not its negatives (as in `tempnet.contrastive.retrieval.cross_entropy`).

Images are dealt out to galleries at random within windows of consecutive images, of eight galleries or, the last one, up to
as many more, so that embeddings are read once, a window at a time. Every gallery has the same number of images, so that
cross-entropies can be compared: the last one of a window is filled up with images of its first ones, which are only
candidates there. Everything is a pure function of the number of images, the size of a gallery and a seed.

Shapes: n images and t captions of a window, m images and c captions of a gallery, q queries, d size of an embedding.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from jobs.scoring.dual_encoders.encoder import (
    EncodingUnit,
    PairSettings,
    embedding_store,
    encode_missing,
    encoding_units,
    pair_options,
    read_embeddings,
)
from jobs.scoring.headroom.config import Headroom
from jobs.scoring.headroom.job import Question, measured_table
from jobs.scoring.units import Finished, ScoringFailedError, UnitStore, map_units, part_file, to_parquet
from jobs.tasks.base import naming_field
from pipelines.local_copy import local_copy
from tempnet.contrastive.retrieval import cross_entropy
from tempnet.headroom.features import Tokens
from tempnet.headroom.run import HeadroomTest
from tempnet.models.dual_encoder import load_training_temperature

FEATURES = {"scalars": "scalars of the scores", "hidden": "embedding", "both": "both"}
DIRECTIONS = {"image_to_text": ("image", "caption"), "text_to_image": ("caption", "image")}
"""Name of a direction → what looks for what."""
# Maximum number of scores held in float64 at a time (32 MiB); a profile needs four copies.
_NUM_SCORES_AT_ONCE = 1 << 22
GALLERIES_PER_WINDOW = 8
# Keeps these random generators distinct from others that are keyed by a seed and a number.
_STREAM = 0x67616C6C
# From 2⁻¹⁰ to 2⁶, because cosines lie in [−1, 1]: below, all of softmax is on the best candidate, above, it is uniform.
CANDIDATES = tuple(2.0 ** (number / 2) for number in range(-20, 13))


class ImageRange(NamedTuple):
    """A window: the images first … stop − 1, which are measured and written as a unit."""

    number: int
    first: int
    stop: int

    def file(self, direction: str) -> str:
        return part_file(list(DIRECTIONS).index(direction), self.number)


class Gallery(NamedTuple):
    """Images of a window that are candidates for each other's captions."""

    images: np.ndarray
    """(m,) places of the images in their window."""
    num_queries: int
    """The first of the images have this gallery as theirs; the others only fill it up."""


class EmbeddedWindow(NamedTuple):
    window: ImageRange
    images: np.ndarray
    """(n, d) unit rows, float32."""
    texts: np.ndarray
    """(t, d) unit rows, float32."""
    owners: np.ndarray
    """(t,) place in the window of the image that each caption belongs to."""


def windows(num_images: int, gallery_images: int) -> list[ImageRange]:
    """Returns the windows of a data set in order; a rest that would be shorter than a window belongs to the last one."""
    size = GALLERIES_PER_WINDOW * gallery_images
    bounds = [*range(0, max(1, num_images // size) * size, size), num_images]
    return [ImageRange(number, first, stop) for number, (first, stop) in enumerate(itertools.pairwise(bounds))]


def galleries(window: ImageRange, gallery_images: int, seed: int) -> list[Gallery]:
    """Returns the galleries of a window, of at most `gallery_images` images; each image is a query of exactly one."""
    order = np.random.default_rng([seed, _STREAM, window.number]).permutation(window.stop - window.first)
    size = min(gallery_images, len(order))
    parts = [order[start : start + size] for start in range(0, len(order), size)]
    return [Gallery(np.concatenate([part, order[: size - len(part)]]), len(part)) for part in parts]


class WindowMeasurer:
    """Makes the tables of a window, in a worker: one for each direction, with a row for every pair, in order."""

    def __init__(self, *, unit_tau: float, gallery_images: int, seed: int) -> None:
        self._unit_tau, self._gallery_images, self._seed = unit_tau, gallery_images, seed

    def __call__(self, embedded: EmbeddedWindow) -> Finished:
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
            captions, owner_of = _captions_of(gallery, owners, len(images))
            x, y = images[gallery.images] / self._unit_tau, texts[captions]
            queries = (owner_of < gallery.num_queries).nonzero().squeeze(-1)  # places among the captions
            pairs.append(captions[queries])
            for chunk in queries.split(max(1, _NUM_SCORES_AT_ONCE // max(len(x), len(y)))):
                owner = owner_of[chunk]
                others = owner_of == owner.unsqueeze(-1)
                others[torch.arange(len(chunk)), chunk] = False
                scores = (x[owner] @ y.T).masked_fill_(others, -torch.inf)
                hidden = images[owners[captions[chunk]]]
                found["image_to_text"].append(Tokens.of_logits(scores, chunk, hidden))
                found["text_to_image"].append(Tokens.of_logits(y[chunk] @ x.T, owner, y[chunk]))
        order = torch.cat(pairs).argsort()
        return {name: Tokens.join(parts, order) for name, parts in found.items()}


def _captions_of(gallery: Gallery, owners: Tensor, num_images: int) -> tuple[Tensor, Tensor]:
    """Returns the captions (c,) of a gallery, by their place in the window, and their images', by that in the gallery."""
    place = torch.full((num_images,), -1)
    place[gallery.images] = torch.arange(len(gallery.images))
    captions = (place[owners] >= 0).nonzero().squeeze(-1)
    return captions, place[owners[captions]]


def find_unit_tau(embedded: EmbeddedWindow, gallery_images: int, seed: int) -> float:
    """Returns the one of `CANDIDATES` with the lowest cross-entropy in the first gallery, both directions together.

    Candidates are so far apart that rounding in the embeddings does not change the choice, and a profile covers 8 times less
    to 8 times more, in which the best constant is then found exactly.
    """
    gallery = galleries(embedded.window, gallery_images, seed)[0]
    captions, owners = _captions_of(gallery, torch.tensor(embedded.owners), len(embedded.images))
    image, text = torch.tensor(embedded.images)[gallery.images], torch.tensor(embedded.texts)[captions]

    def loss(tau: float) -> float:
        return cross_entropy(image, text, owners, (torch.tensor([tau]), torch.tensor([tau])))

    return min(CANDIDATES, key=loss)


class _Embedded(NamedTuple):
    store: UnitStore
    images: list[EncodingUnit]
    texts: list[EncodingUnit]
    owners: np.ndarray
    """(t,) number of the image that each caption belongs to; it never falls."""

    def read(self, window: ImageRange) -> EmbeddedWindow:
        first, stop = np.searchsorted(self.owners, [window.first, window.stop]).tolist()
        images, texts = self._rows(self.images, window.first, window.stop), self._rows(self.texts, first, stop)
        return EmbeddedWindow(window, images, texts, self.owners[first:stop] - window.first)

    def _rows(self, units: list[EncodingUnit], first: int, stop: int) -> np.ndarray:
        chosen = [unit for unit in units if unit.start < stop and unit.stop > first]
        rows = read_embeddings(self.store, chosen)
        return rows[first - chosen[0].start : stop - chosen[0].start]


@dataclass(frozen=True, slots=True, kw_only=True)
class PairMeasurement(PairSettings):
    own_fields = ("precision", "gallery_images", "gallery_seed")
    own_tau: float | None
    """The constant temperature that the model was trained at; None if it has none."""
    warning: str = ""

    @classmethod
    def resolve(cls, config: Headroom) -> PairMeasurement:
        options = pair_options(config)
        with naming_field("model: "):
            own_tau = load_training_temperature(local_copy(options["model"].path))
        return cls(**options, own_tau=own_tau)

    @property
    def source(self) -> str:
        return self.images.source

    def record(self) -> dict[str, Any]:
        """Returns everything that decides what is measured, as a flat mapping, without locations and the batch size."""
        return {"own_tau": self.own_tau, **PairSettings.record(self)}

    def advice(self, test: HeadroomTest, question: Question) -> str:
        """Returns nothing: no command trains a TempNet for the retrieval cross-entropy of a gallery."""
        return ""

    def measure(self, output: str) -> list[Question]:
        """Encode and measure what is missing in `output`, and return a question for each direction."""
        embedded = self._encode(output)
        size, seed = self.config.gallery_images, self.config.gallery_seed
        parts = windows(int(embedded.owners[-1]) + 1, size)
        unit_tau = self.own_tau
        if unit_tau is None:
            unit_tau = find_unit_tau(embedded.read(parts[0]), size, seed)
            print(
                f"{self.config.model} holds no constant temperature that it was trained at, so that temperatures are "
                f"compared with the best constant only; they are looked for around {unit_tau:.3g}"
            )
        store = UnitStore(output)

        def read(window: ImageRange) -> Iterator[EmbeddedWindow]:
            yield embedded.read(window)

        # Scores and profiles are computed in float64, on CPUs.
        map_units(
            store.missing(parts, lambda window: map(window.file, DIRECTIONS)),
            partial(WindowMeasurer, unit_tau=unit_tau, gallery_images=size, seed=seed),
            replace(self.config.workers, use_gpu=False),
            store,
            read=read,
            title=lambda window: f"images {window.first}–{window.stop - 1}",
            noun="pairs",
        ).check()
        return [
            Question(
                name=name,
                title=name.replace("_to_", " → "),
                files=[window.file(name) for window in parts],
                noun=noun,
                case="pair",
                document="image",
                candidate=candidate,
                features=FEATURES,
                unit_tau=unit_tau,
                own_name="" if self.own_tau is None else f"the model's τ = {unit_tau:.4g}",
                facts={"own_tau": self.own_tau, "gallery_images": size},
            )
            for name, (noun, candidate) in DIRECTIONS.items()
        ]

    def _encode(self, output: str) -> _Embedded:
        config, pairs = self.config, self.begin(output)
        if pairs.manifest.num_images < config.folds:
            raise ValueError(
                f"images = {config.images!r} has {pairs.manifest.num_images} readable images with captions, fewer than "
                f"folds = {config.folds}: the interval is over images, so give more of them"
            )
        texts, owners = pairs.captions()
        store = embedding_store(output)
        of_images, of_texts = encoding_units(self.model, config.precision, "images", pairs, texts)
        if failed := encode_missing([*of_images, *of_texts], {"images": pairs}, store, config):
            raise ScoringFailedError(failed)
        # Their texts are not needed any more, and would be sent to every reader.
        return _Embedded(store, of_images, [replace(unit, texts=()) for unit in of_texts], owners)
