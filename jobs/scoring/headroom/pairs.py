"""The predictions of an image–text model: checked settings, and prepared images → embeddings → galleries → tables.

The encoders see every image and caption once: embeddings are kept in the output, in the store of `jobs.evaluate_clip`. A
job that is started again encodes and measures only what its output still lacks. The tables, one for each direction,
depend neither on the number of workers nor on the order in which units are finished. How many images can be read is
known only once they are prepared; all else is checked before Ray is started.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np

from jobs.engine.cluster import start_ray
from jobs.scoring.dual_encoders.data import model_record, pairs_record, resolve_pairs
from jobs.scoring.dual_encoders.embeddings import (
    EncodingUnit,
    embedding_store,
    encode_missing,
    image_units,
    read_embeddings,
    text_units,
)
from jobs.scoring.dual_encoders.encoder import DualEncoderSpec, caption_encoder
from jobs.scoring.dual_encoders.images import PairImages
from jobs.scoring.headroom.config import Headroom
from jobs.scoring.headroom.galleries import (
    DIRECTIONS,
    EmbeddedWindow,
    ImageRange,
    WindowMeasurer,
    find_unit_tau,
    windows,
)
from jobs.scoring.headroom.questions import Question
from jobs.scoring.units import ScoringFailedError, UnitStore, Work, check_pool, map_units
from jobs.tasks.base import naming_field
from pipelines.images.prepare import PrepareImagesConfig, describe, prepare_images
from pipelines.local_copy import local_copy
from tempnet.headroom.run import HeadroomTest
from tempnet.models.dual_encoder import load_training_temperature

PREPARED_DIRECTORY = "_prepared"
FORMAT_VERSION = 1
FEATURES = {"scalars": "scalars of the scores", "hidden": "embedding", "both": "both"}
_NOUNS = {"image_to_text": ("image", "caption"), "text_to_image": ("caption", "image")}


@dataclass(frozen=True, slots=True, kw_only=True)
class PairHeadroomSettings:
    """Settings for the workers; local paths are absolute, because a worker has its own working directory."""

    images: PrepareImagesConfig
    model: DualEncoderSpec
    own_tau: float | None
    """The constant temperature that the model was trained at; None if it has none."""
    precision: Literal["fp32", "bf16"]
    batch_size: int
    gallery_images: int
    gallery_seed: int

    def record(self) -> dict[str, Any]:
        """Returns everything that decides what is measured, as a flat mapping."""
        names = ("own_tau", "precision", "gallery_images", "gallery_seed")
        return {
            "version": FORMAT_VERSION,
            "kind": "image-text pairs",
            **{name: getattr(self, name) for name in names},
            **model_record(self.model),
            **pairs_record(self.images),
        }


def resolve_settings(config: Headroom) -> PairHeadroomSettings:
    """Returns the settings for a configuration with images.

    Raises:
        FileNotFoundError, OSError: if images, captions or the model are missing.
        ValueError: naming the field, if they do not fit together or the model is none of images and texts.
    """
    assert config.precision in ("fp32", "bf16")
    images, model = resolve_pairs(config)
    with naming_field("model: "):
        own_tau = load_training_temperature(local_copy(model.path))
    return PairHeadroomSettings(
        images=images,
        model=model,
        own_tau=own_tau,
        precision=config.precision,
        batch_size=config.batch_size,
        gallery_images=config.gallery_images,
        gallery_seed=config.gallery_seed,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Embedded:
    """Where the embeddings of all pairs are."""

    store: UnitStore
    images: list[EncodingUnit]
    texts: list[EncodingUnit]
    owners: np.ndarray
    """(t,) number of the image that each caption belongs to; it never falls."""

    def read(self, window: ImageRange) -> EmbeddedWindow:
        """Read the embeddings of a window."""
        first, stop = np.searchsorted(self.owners, [window.first, window.stop])
        return EmbeddedWindow(
            window=window,
            images=self._rows(self.images, window.first, window.stop),
            texts=self._rows(self.texts, int(first), int(stop)),
            owners=self.owners[first:stop] - window.first,
        )

    def _rows(self, units: list[EncodingUnit], first: int, stop: int) -> np.ndarray:
        """Return the rows of the images, or texts, first … stop − 1."""
        chosen = [unit for unit in units if unit.start < stop and unit.stop > first]
        rows = read_embeddings(self.store, chosen).rows
        return rows[first - chosen[0].start : stop - chosen[0].start]


@dataclass(frozen=True, slots=True, kw_only=True)
class PairMeasurement:
    """Image–text pairs and an image–text model."""

    config: Headroom
    settings: PairHeadroomSettings
    kind: str = "images"
    warning: str = ""

    @classmethod
    def resolve(cls, config: Headroom) -> PairMeasurement:
        """Check a configuration.

        Raises:
            ValueError, OSError: before any work starts, see `resolve_settings`.
        """
        return cls(config=config, settings=resolve_settings(config))

    @property
    def source(self) -> str:
        """Path or URI of the images."""
        return self.settings.images.source

    def record(self) -> dict[str, Any]:
        """Returns everything that decides what is measured, without file locations and the batch size."""
        return self.settings.record()

    def facts(self, output: str, questions: Sequence[Question]) -> dict[str, Any]:
        """Returns the model's own temperature (None if it has none) and the size of a gallery."""
        return {"own_tau": self.settings.own_tau, "gallery_images": self.settings.gallery_images}

    def advice(self, test: HeadroomTest, question: Question) -> str:
        """Returns nothing: no command trains a TempNet for the retrieval cross-entropy of a gallery."""
        return ""

    def measure(self, output: str) -> list[Question]:
        """Encode and measure what is missing in `output`, and return a question for each direction.

        Raises:
            ValueError: if there are fewer images than folds.
            ScoringFailedError: naming everything that failed; what was finished is kept.
            TooManyProblemsError: if too many samples are unreadable.
        """
        start_ray()
        check_pool(self.config.workers, reads=True)  # before the images are prepared
        embedded = self._encode(output)
        num_images = int(embedded.owners[-1]) + 1
        parts = windows(num_images, self.settings.gallery_images)
        unit_tau = self.settings.own_tau
        if unit_tau is None:
            unit_tau = find_unit_tau(embedded.read(parts[0]), self.settings.gallery_images, self.settings.gallery_seed)
            print(
                f"{self.config.model} holds no constant temperature that it was trained at, so that temperatures are "
                f"compared with the best constant only; they are looked for around {unit_tau:.3g}"
            )
        self._measure_missing(output, embedded, parts, unit_tau)
        own_name = "" if self.settings.own_tau is None else f"the model's τ = {unit_tau:.4g}"
        return [
            Question(
                name=name,
                title=name.replace("_to_", " → "),
                files=tuple(window.file(name) for window in parts),
                noun=noun,
                case="pair",
                document="image",
                candidate=candidate,
                features=FEATURES,
                unit_tau=unit_tau,
                own_name=own_name,
            )
            for name, (noun, candidate) in _NOUNS.items()
        ]

    def _encode(self, output: str) -> _Embedded:
        """Prepare the images and encode what the store lacks."""
        settings, config = self.settings, self.config
        manifest = prepare_images(
            settings.images, f"{output}/{PREPARED_DIRECTORY}", max_bad_share_field="max_bad_share"
        )
        print(describe(manifest))
        if manifest.num_images < config.folds:
            raise ValueError(
                f"images = {config.images!r} has {manifest.num_images} readable images with captions, fewer than folds = "
                f"{config.folds}: the interval is over images, so give more of them"
            )
        images = PairImages(manifest=manifest, tokenizer=caption_encoder(settings.model).tokenizer)
        texts, owners = images.source(1).captions()
        store = embedding_store(output)
        of_images = image_units(settings.model, settings.precision, "images", images.digest, images.num_images)
        of_texts = text_units(settings.model, settings.precision, "images", texts)
        failed = encode_missing(
            [*of_images, *of_texts],
            {"images": images},
            store,
            config.workers,
            precision=settings.precision,
            batch_size=settings.batch_size,
        )
        if failed:
            raise ScoringFailedError(failed)
        # Their texts are not needed any more, and would be sent to every reader.
        return _Embedded(
            store=store, images=of_images, texts=[replace(unit, texts=()) for unit in of_texts], owners=owners
        )

    def _measure_missing(self, output: str, embedded: _Embedded, parts: list[ImageRange], unit_tau: float) -> None:
        """Write the tables of the windows that lack one."""
        store = UnitStore(output)
        done = store.parts()
        missing = [window for window in parts if not all(window.file(name) in done for name in DIRECTIONS)]
        print(f"{output}: {len(parts) - len(missing)} of {len(parts)} windows of images were measured before")

        def read(window: ImageRange) -> Iterator[EmbeddedWindow]:
            yield embedded.read(window)

        settings = self.settings
        work: Work[ImageRange] = Work(
            read=read,
            model=partial(
                WindowMeasurer,
                unit_tau=unit_tau,
                gallery_images=settings.gallery_images,
                seed=settings.gallery_seed,
            ),
            title=lambda window: f"images {window.first}–{window.stop - 1}",
            noun="pairs",
        )
        # Scores and profiles are computed in float64, on CPUs.
        map_units(missing, work, replace(self.config.workers, use_gpu=False), store).check()
