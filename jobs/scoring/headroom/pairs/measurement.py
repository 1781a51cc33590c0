"""Measuring image–text pairs: prepared images → embeddings → galleries → tables of both directions.

The encoders see every image and caption once: embeddings are kept in the output, in the store of `jobs.evaluate_clip`. A
job that is started again encodes and measures only what its output still lacks. The tables depend neither on the
number of workers nor on the order in which units are finished.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from jobs.engine.cluster import start_ray
from jobs.scoring.dual_encoders.encoder import caption_encoder
from jobs.scoring.dual_encoders.encoding import encode_missing
from jobs.scoring.dual_encoders.images import PairImages
from jobs.scoring.dual_encoders.units import Embeddings, EmbeddingStore, Unit, image_units, text_units
from jobs.scoring.headroom.config import Headroom
from jobs.scoring.headroom.pairs.galleries import Window, windows
from jobs.scoring.headroom.pairs.measure import DIRECTIONS, EmbeddedWindow, WindowMeasurer
from jobs.scoring.headroom.pairs.settings import PairHeadroomSettings, resolve_settings
from jobs.scoring.headroom.pairs.unit import find_unit_tau
from jobs.scoring.headroom.questions import Question
from jobs.scoring.stages import ScoringFailedError, Stages, check_pool, run_stages
from jobs.scoring.temperatures.tables import existing_parts, part_file, write_part
from pipelines.images.prepare import describe, prepare_images

PREPARED_DIRECTORY = "_prepared"
FEATURES = {"scalars": "scalars of the scores", "hidden": "embedding", "both": "both"}
_NOUNS = {"image_to_text": ("image", "caption"), "text_to_image": ("caption", "image")}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Embedded:
    """Where the embeddings of all pairs are."""

    store: EmbeddingStore
    images: list[Unit]
    texts: list[Unit]
    owners: np.ndarray
    """(t,) number of the image that each caption belongs to; it never falls."""

    def read(self, window: Window) -> EmbeddedWindow:
        """Read the embeddings of a window."""
        first, stop = np.searchsorted(self.owners, [window.first, window.stop])
        return EmbeddedWindow(
            window=window,
            images=self._rows(self.images, window.first, window.stop),
            texts=self._rows(self.texts, int(first), int(stop)),
            owners=self.owners[first:stop] - window.first,
        )

    def _rows(self, units: list[Unit], first: int, stop: int) -> np.ndarray:
        """Return the rows of the images, or texts, first … stop − 1."""
        chosen = [unit for unit in units if unit.start < stop and unit.stop > first]
        rows = Embeddings.join([self.store.read(unit) for unit in chosen]).rows
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

    def facts(self) -> dict[str, Any]:
        """Returns the model's own temperature (None if it has none) and the size of a gallery."""
        return {"own_tau": self.settings.own_tau, "gallery_images": self.settings.gallery_images}

    def measure(self, output: str) -> list[Question]:
        """Encode and measure what is missing in `output`, and return a question for each direction.

        Raises:
            ValueError: if there are fewer images than folds, or embeddings are not finite.
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
                files=tuple(part_file(number, window.number) for window in parts),
                noun=noun,
                case="pair",
                document="image",
                candidate=candidate,
                features=FEATURES,
                unit_tau=unit_tau,
                own_name=own_name,
            )
            for number, (name, (noun, candidate)) in enumerate(_NOUNS.items())
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
        store = EmbeddingStore(output)
        of_images = image_units(settings.model, settings.precision, "images", images.digest, images.num_images)
        of_texts = text_units(settings.model, settings.precision, "images", texts)
        failed = encode_missing(
            [*of_images, *of_texts],
            {"images": images},
            store,
            config.workers,
            precision=settings.precision,
            batch_size=settings.batch_size,
            check=partial(_check_finite, config.model),
        )
        if failed:
            raise ScoringFailedError(failed)
        # Their texts are not needed any more, and would be sent to every reader.
        return _Embedded(
            store=store, images=of_images, texts=[replace(unit, texts=()) for unit in of_texts], owners=owners
        )

    def _measure_missing(self, output: str, embedded: _Embedded, parts: list[Window], unit_tau: float) -> None:
        """Write the tables of the windows that lack one."""
        done = existing_parts(output)
        directions = range(len(DIRECTIONS))
        missing = [
            window for window in parts if not all(part_file(number, window.number) in done for number in directions)
        ]
        print(f"{output}: {len(parts) - len(missing)} of {len(parts)} windows of images were measured before")

        def read(window: Window) -> Iterator[EmbeddedWindow]:
            yield embedded.read(window)

        def write(measured: tuple[Window, dict[str, pa.Table]]) -> int:
            window, tables = measured
            for number, name in enumerate(DIRECTIONS):
                write_part(tables[name], output, part_file(number, window.number))
            return int(tables[DIRECTIONS[0]].num_rows)

        stages: Stages[Window] = Stages(
            read=read,
            model=partial(
                WindowMeasurer,
                unit_tau=unit_tau,
                gallery_images=self.settings.gallery_images,
                seed=self.settings.gallery_seed,
            ),
            write=write,
        )
        failed = run_stages(
            stages,
            missing,
            replace(self.config.workers, use_gpu=False),  # scores and profiles are computed in float64
            title=lambda window: f"images {window.first}–{window.stop - 1}",
            keep=lambda _, num_pairs, seconds: f"{num_pairs} pairs, {num_pairs / seconds:,.0f} pairs/s",
        )
        if failed:
            raise ScoringFailedError(failed)


def _check_finite(model: str, unit: Unit, embeddings: Embeddings) -> None:
    """Refuse embeddings that are not finite: nothing can be said of the model then.

    Raises:
        ValueError: naming the model and the number of rows.
    """
    bad = int((~np.isfinite(embeddings.rows)).any(-1).sum())
    if bad:
        noun = "images" if unit.modality == "image" else "captions"
        raise ValueError(
            f"model = {model!r}: the embeddings of {bad} of {len(embeddings.rows)} {noun} ({unit.start} to {unit.stop - 1}) "
            "are NaN or infinite"
        )
