"""The embeddings of an evaluation: units of images or texts → decoding → a pool of encoders → one file per unit.

The name of a file is a hash of everything that decides its content. It leaves out the batch size, the workers and the
device, which affect only the last digits.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import safetensors.numpy

from jobs.scoring.config import PoolSection
from jobs.scoring.dual_encoders.encoder import DualEncoderSpec, Encoder
from jobs.scoring.dual_encoders.images import ImageSet, read_images
from jobs.scoring.models import LoadedModel
from jobs.scoring.units import Finished, UnitStore, Work, map_units

# Increase this whenever the same input would give other embeddings.
_VERSION = 2
NUM_IMAGES_PER_UNIT = 256
NUM_TEXTS_PER_UNIT = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodingUnit:
    """Consecutive images, or texts, of one data set, to be encoded by one model."""

    model: DualEncoderSpec
    data: str
    """Name of the data set."""
    modality: Literal["image", "text"]
    start: int
    stop: int
    """The unit covers the images, or texts, with the numbers start … stop − 1 of the data set."""
    texts: tuple[str, ...] = ()
    key: str

    @property
    def file(self) -> str:
        """Name of the file of its embeddings."""
        return f"{self.key}.safetensors"

    @property
    def title(self) -> str:
        """Name of the unit in messages."""
        return f"{self.model.label} · {self.data} · {self.modality}s {self.start}–{self.stop - 1}"


def image_units(model: DualEncoderSpec, precision: str, data: str, digest: str, num_images: int) -> list[EncodingUnit]:
    """Returns the units of a data set's images; `digest` must identify the images and their order."""
    spans = _spans(num_images, NUM_IMAGES_PER_UNIT)
    return [
        EncodingUnit(
            model=model,
            data=data,
            modality="image",
            start=start,
            stop=stop,
            key=_key(model.digest, precision, model.image_size, digest, start, stop),
        )
        for start, stop in spans
    ]


def text_units(model: DualEncoderSpec, precision: str, data: str, texts: Sequence[str]) -> list[EncodingUnit]:
    """Returns the units of a data set's texts."""
    spans = _spans(len(texts), NUM_TEXTS_PER_UNIT)
    return [
        EncodingUnit(
            model=model,
            data=data,
            modality="text",
            start=start,
            stop=stop,
            texts=tuple(texts[start:stop]),
            key=_key(model.digest, precision, model.num_text_tokens, *texts[start:stop]),
        )
        for start, stop in spans
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Embeddings:
    """The embeddings of one unit, or of several units joined."""

    rows: np.ndarray
    """(n, d) unit rows, float32."""
    numbers: np.ndarray
    """(n,) int64: the number of each image or text in its data set."""
    problems: tuple[str, ...] = ()
    """Descriptions of the images that could not be read."""

    @classmethod
    def join(cls, parts: Sequence[Embeddings]) -> Embeddings:
        """Concatenate the embeddings of several units."""
        return cls(
            rows=np.concatenate([part.rows for part in parts]),
            numbers=np.concatenate([part.numbers for part in parts]),
            problems=tuple(problem for part in parts for problem in part.problems),
        )

    @classmethod
    def load(cls, content: bytes, start: int) -> Embeddings:
        """Returns the embeddings of a unit that `save` has turned into a file."""
        arrays = safetensors.numpy.load(content)
        problems = json.loads(arrays["problems"].tobytes())
        return cls(rows=arrays["rows"], numbers=start + arrays["numbers"], problems=tuple(problems))

    def save(self, start: int) -> bytes:
        """Returns the content of the file of a unit that begins at a number; numbers in it are relative to this."""
        problems = np.frombuffer(json.dumps(self.problems).encode(), dtype=np.uint8)
        return safetensors.numpy.save({"rows": self.rows, "numbers": self.numbers - start, "problems": problems})


def embedding_store(directory: str) -> UnitStore:
    """Returns the store of the embeddings of an evaluation, given by its directory (a path or a URI)."""
    return UnitStore(f"{directory}/embeddings")


def read_embeddings(store: UnitStore, units: Sequence[EncodingUnit]) -> Embeddings:
    """Read the embeddings of finished units, joined."""
    return Embeddings.join([Embeddings.load(store.read(unit.file), unit.start) for unit in units])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Decoded:
    """A unit that is ready to be encoded."""

    unit: EncodingUnit
    images: np.ndarray
    """The images that can be used, uint8 (n, S, S, 3); none for a unit of texts."""
    numbers: np.ndarray
    """(n,) the number of each image or text in its data set."""
    problems: Sequence[str] = ()
    """Descriptions of the images that cannot be used."""


class _UnitEncoder:
    """Encodes units in a worker, which holds one model at a time."""

    def __init__(self, **options: Any) -> None:
        self._encoder = LoadedModel[DualEncoderSpec, Encoder](lambda spec: Encoder(spec, **options))

    def __call__(self, decoded: _Decoded) -> Finished:
        """Encode a unit.

        Raises:
            ValueError: if embeddings are not finite: nothing can be said of the model then.
        """
        encoder, unit = self._encoder.get(decoded.unit.model), decoded.unit
        rows = encoder.images(decoded.images) if unit.modality == "image" else encoder.texts(unit.texts)
        if bad := int((~np.isfinite(rows)).any(-1).sum()):
            raise ValueError(
                f"model = {unit.model.path!r}: the embeddings of {bad} of {len(rows)} {unit.modality}s ({unit.start} to "
                f"{unit.stop - 1}) are NaN or infinite"
            )
        embeddings = Embeddings(rows=rows, numbers=decoded.numbers, problems=tuple(decoded.problems))
        return Finished(files={unit.file: embeddings.save(unit.start)}, num_cases=len(rows))


def encode_missing(
    units: Sequence[EncodingUnit],
    sets: Mapping[str, ImageSet],
    store: UnitStore,
    pool: PoolSection,
    *,
    precision: str,
    batch_size: int,
) -> dict[str, str]:
    """Encode the units that the store lacks, and put each into it as soon as it is finished.

    Args:
        units: the units; those that are in the store already, or occur twice, are not encoded again.
        sets: the images of every data set, by name.
        store: where the embeddings go.
        pool: number and resources of the workers.
        precision: precision of the encoders, fp32 or bf16.
        batch_size: number of images, or of texts, per forward pass.

    Returns:
        title → reason for every unit that failed.
    """
    by_key = {unit.key: unit for unit in units}  # two data sets may have the same texts
    finished = store.names()
    left = [unit for unit in by_key.values() if unit.file not in finished]
    print(f"{len(by_key)} units, {len(by_key) - len(left)} of them encoded before; {store.directory}")

    def read(unit: EncodingUnit) -> Iterator[_Decoded]:
        numbers = np.arange(unit.start, unit.stop)
        if unit.modality == "text":
            yield _Decoded(unit=unit, images=np.empty(0, np.uint8), numbers=numbers)
            return
        images, numbers, problems = read_images(sets[unit.data], numbers.tolist(), unit.model.image_size)
        yield _Decoded(unit=unit, images=images, numbers=numbers, problems=problems)

    model = partial(_UnitEncoder, precision=precision, batch_size=batch_size, use_gpu=pool.use_gpu)
    work: Work[EncodingUnit] = Work(read=read, model=model, title=lambda unit: unit.title, noun="samples")
    return map_units(left, work, pool, store).failed


def _spans(num: int, size: int) -> list[tuple[int, int]]:
    return [(start, min(start + size, num)) for start in range(0, num, size)]


def _key(*what: Any) -> str:
    """Returns a hash of everything that decides the embeddings of a unit, as 24 hex digits."""
    return hashlib.blake2b(json.dumps([_VERSION, *what]).encode(), digest_size=12).hexdigest()
