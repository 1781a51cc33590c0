"""Units of encoding, and the store of embeddings: one safetensors file per unit, named by a hash.

The hash covers everything that decides a unit's content. It leaves out the batch size, the workers and the device,
which affect only the last digits.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import safetensors.numpy
from pyarrow.fs import FileType

from jobs.engine.fields import absolute_path
from jobs.scoring.models import ModelSpec
from jobs.tasks.base import naming_field
from pipelines.local_copy import is_directory, local_copy
from pipelines.storage import join, resolve
from tempnet.fingerprints import files_digest
from tempnet.models.dual_encoder import DualEncoder
from tempnet.models.dual_encoder_config import IMAGE_ENCODER_DIRECTORY, TEXT_ENCODER_DIRECTORY

# Increase this whenever the same input would give other embeddings.
_VERSION = 2
NUM_IMAGES_PER_UNIT = 256
NUM_TEXTS_PER_UNIT = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class DualEncoderSpec(ModelSpec):
    """Description of a dual encoder; its digest covers both encoders and their projections."""

    image_size: int
    """Side of the images in pixels."""
    num_text_tokens: int
    """Maximum number of tokens of a text; longer texts are cut."""
    vocab_size: int
    """Number of tokens in the text encoder's embedding table."""

    @classmethod
    def read(cls, label: str, path: str, *, field: str = "models") -> DualEncoderSpec:
        """Returns the description of a dual encoder, which is loaded once to check that it can be.

        Raises:
            ValueError: naming the field and the path, if it is not a directory with a dual encoder.
        """
        try:
            place = Path(local_copy(path))
        except ValueError as error:
            raise ValueError(f"{field}: {error}") from error
        if not place.exists():
            raise ValueError(f"{field}: {path!r} is missing: there is no such directory")
        if not place.is_dir():
            raise ValueError(f"{field}: {path!r} is no directory with a dual encoder or a Transformers CLIPModel")
        with naming_field(f"{field}: "):
            model = DualEncoder.from_pretrained(place)
        tokens: Any = model.text_encoder.get_input_embeddings()
        parts = [place, place / IMAGE_ENCODER_DIRECTORY, place / TEXT_ENCODER_DIRECTORY]
        return cls(
            label=label,
            path=absolute_path(path),
            digest=files_digest(
                file for part in parts if part.is_dir() for file in sorted(part.iterdir()) if file.is_file()
            ),
            image_size=model.config.image_size,
            num_text_tokens=model.config.num_text_tokens,
            vocab_size=tokens.num_embeddings,
        )

    @property
    def tokenizer(self) -> str:
        """Directory of the model's tokenizer."""
        beside = join(self.path, TEXT_ENCODER_DIRECTORY)
        return beside if is_directory(beside) else self.path


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
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
    def title(self) -> str:
        """Name of the unit in messages."""
        return f"{self.model.label} · {self.data} · {self.modality}s {self.start}–{self.stop - 1}"


def image_units(model: DualEncoderSpec, precision: str, data: str, digest: str, num_images: int) -> list[Unit]:
    """Returns the units of a data set's images; `digest` must identify the images and their order."""
    spans = _spans(num_images, NUM_IMAGES_PER_UNIT)
    return [
        Unit(
            model=model,
            data=data,
            modality="image",
            start=start,
            stop=stop,
            key=_key(model.digest, precision, model.image_size, digest, start, stop),
        )
        for start, stop in spans
    ]


def text_units(model: DualEncoderSpec, precision: str, data: str, texts: Sequence[str]) -> list[Unit]:
    """Returns the units of a data set's texts."""
    spans = _spans(len(texts), NUM_TEXTS_PER_UNIT)
    return [
        Unit(
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


class EmbeddingStore:
    """Stores the embeddings of an evaluation in its directory (a path or a URI)."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self._directory = f"{directory}/embeddings"
        filesystem, path = resolve(self._directory)
        filesystem.create_dir(path, recursive=True)

    def has(self, unit: Unit) -> bool:
        """Returns whether the embeddings of a unit are stored."""
        filesystem, path = resolve(self._file(unit))
        return filesystem.get_file_info(path).type == FileType.File

    def read(self, unit: Unit) -> Embeddings:
        """Read the embeddings of a finished unit."""
        filesystem, path = resolve(self._file(unit))
        with filesystem.open_input_stream(path) as stream:
            arrays = safetensors.numpy.load(stream.read())
        problems = json.loads(arrays["problems"].tobytes())
        return Embeddings(rows=arrays["rows"], numbers=unit.start + arrays["numbers"], problems=tuple(problems))

    def write(self, unit: Unit, embeddings: Embeddings) -> None:
        """Store the embeddings of a unit atomically: a reader sees the whole file or none."""
        arrays = {
            "rows": embeddings.rows,
            "numbers": embeddings.numbers - unit.start,
            "problems": np.frombuffer(json.dumps(embeddings.problems).encode(), dtype=np.uint8),
        }
        filesystem, path = resolve(self._file(unit))
        with filesystem.open_output_stream(f"{path}.partial") as stream:
            stream.write(safetensors.numpy.save(arrays))
        filesystem.move(f"{path}.partial", path)

    def _file(self, unit: Unit) -> str:
        return f"{self._directory}/{unit.key}.safetensors"


def _spans(num: int, size: int) -> list[tuple[int, int]]:
    return [(start, min(start + size, num)) for start in range(0, num, size)]


def _key(*what: Any) -> str:
    """Returns a hash of everything that decides the embeddings of a unit, as 24 hex digits."""
    return hashlib.blake2b(json.dumps([_VERSION, *what]).encode(), digest_size=12).hexdigest()
