"""The stages that encode units: decode images → encode in a pool of workers → write to the store."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from jobs.scoring.config import PoolSection
from jobs.scoring.dual_encoders.encoder import Encoder
from jobs.scoring.dual_encoders.images import ImageSet, read_images
from jobs.scoring.dual_encoders.units import DualEncoderSpec, Embeddings, EmbeddingStore, Unit
from jobs.scoring.models import LoadedModel
from jobs.scoring.stages import Stages, run_stages


@dataclass(frozen=True, slots=True, kw_only=True)
class _Decoded:
    """A unit that is ready to be encoded."""

    unit: Unit
    images: np.ndarray
    """The images that can be used, uint8 (n, S, S, 3); none for a unit of texts."""
    numbers: np.ndarray
    """(n,) the number of each image or text in its data set."""
    problems: Sequence[str] = ()
    """Descriptions of the images that cannot be used."""


class _UnitEncoder:
    """Encodes units in a worker, which holds one model at a time."""

    def __init__(self, *, precision: str, batch_size: int, use_gpu: bool) -> None:
        self._options: dict[str, Any] = {"precision": precision, "batch_size": batch_size, "use_gpu": use_gpu}
        self._encoder = LoadedModel(self._load)

    def __call__(self, decoded: _Decoded) -> Embeddings:
        encoder, unit = self._encoder.get(decoded.unit.model), decoded.unit
        # Copied because torch needs writable memory, and the object store's is not.
        rows = encoder.images(decoded.images.copy()) if unit.modality == "image" else encoder.texts(unit.texts)
        return Embeddings(rows=rows, numbers=decoded.numbers, problems=tuple(decoded.problems))

    def _load(self, spec: DualEncoderSpec) -> Encoder:
        return Encoder(spec, **self._options)


def encode_missing(
    units: Sequence[Unit],
    sets: Mapping[str, ImageSet],
    store: EmbeddingStore,
    pool: PoolSection,
    *,
    precision: str,
    batch_size: int,
    check: Callable[[Unit, Embeddings], None] | None = None,
) -> dict[str, str]:
    """Encode the units that the store lacks, and put each into it as soon as it is finished.

    Args:
        units: the units; those that are in the store already, or occur twice, are not encoded again.
        sets: the images of every data set, by name.
        store: where the embeddings go.
        pool: number and resources of the workers.
        precision: precision of the encoders, fp32 or bf16.
        batch_size: number of images, or of texts, per forward pass.
        check: called with the embeddings of a unit before they are stored; what it raises ends the job.

    Returns:
        title → reason for every unit that failed.
    """
    by_key = {unit.key: unit for unit in units}  # two data sets may have the same texts
    left = [unit for unit in by_key.values() if not store.has(unit)]
    print(f"{len(by_key)} units, {len(by_key) - len(left)} of them encoded before; {store.directory}")

    def read(unit: Unit) -> Iterator[_Decoded]:
        numbers = np.arange(unit.start, unit.stop)
        if unit.modality == "text":
            yield _Decoded(unit=unit, images=np.empty(0, np.uint8), numbers=numbers)
            return
        images, numbers, problems = read_images(sets[unit.data], numbers.tolist(), unit.model.image_size)
        yield _Decoded(unit=unit, images=images, numbers=numbers, problems=problems)

    def keep(unit: Unit, embeddings: Embeddings, seconds: float) -> None:
        if check is not None:
            check(unit, embeddings)
        store.write(unit, embeddings)

    model = partial(_UnitEncoder, precision=precision, batch_size=batch_size, use_gpu=pool.use_gpu)
    stages: Stages[Unit] = Stages(read=read, model=model)
    return run_stages(stages, left, pool, title=lambda unit: unit.title, keep=keep)
