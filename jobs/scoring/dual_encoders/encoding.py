"""The stages that encode units: decode images → encode in a pool of workers → write to the store."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from jobs.scoring.dual_encoders.config import EvaluateClipConfig
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

    def __init__(self, config: EvaluateClipConfig) -> None:
        self._config = config
        self._encoder = LoadedModel(self._load)

    def __call__(self, decoded: _Decoded) -> Embeddings:
        encoder, unit = self._encoder.get(decoded.unit.model), decoded.unit
        # Copied because torch needs writable memory, and the object store's is not.
        rows = encoder.images(decoded.images.copy()) if unit.modality == "image" else encoder.texts(unit.texts)
        return Embeddings(rows=rows, numbers=decoded.numbers, problems=tuple(decoded.problems))

    def _load(self, spec: DualEncoderSpec) -> Encoder:
        config = self._config
        return Encoder(spec, precision=config.precision, batch_size=config.batch_size, use_gpu=config.workers.use_gpu)


def encode(
    config: EvaluateClipConfig, units: Sequence[Unit], sets: Mapping[str, ImageSet], store: EmbeddingStore
) -> dict[str, str]:
    """Encode units, and put each into the store as soon as it is finished.

    Args:
        config: the configuration of the evaluation.
        units: the units to encode.
        sets: the images of every data set, by name.
        store: where the embeddings go.

    Returns:
        title → reason for every unit that failed.
    """

    def read(unit: Unit) -> Iterator[_Decoded]:
        numbers = np.arange(unit.start, unit.stop)
        if unit.modality == "text":
            yield _Decoded(unit=unit, images=np.empty(0, np.uint8), numbers=numbers)
            return
        images, numbers, problems = read_images(sets[unit.data], numbers.tolist(), unit.model.image_size)
        yield _Decoded(unit=unit, images=images, numbers=numbers, problems=problems)

    def keep(unit: Unit, embeddings: Embeddings, seconds: float) -> None:
        store.write(unit, embeddings)

    stages: Stages[Unit] = Stages(read=read, model=partial(_UnitEncoder, config))
    return run_stages(stages, units, config.workers, title=lambda unit: unit.title, keep=keep)
