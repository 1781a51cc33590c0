"""Units of encoding, and the store of embeddings: one safetensors file a unit, named by a hash of what decides its content.

The batch size, the workers and the device are no part of the hash: they change nothing but the last digits.
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
from pipelines.storage import resolve
from pyarrow.fs import FileType
from tempnet.models.dual_encoder import IMAGE_ENCODER_DIRECTORY, TEXT_ENCODER_DIRECTORY, DualEncoder

from jobs.engine.fingerprints import files_digest

# Goes up whenever this program would compute other embeddings from the same input.
_VERSION = 2
NUM_IMAGES_PER_UNIT = 256
NUM_TEXTS_PER_UNIT = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A model as data that travels to the workers."""

    label: str
    """How it is called in the results."""
    path: str
    digest: str
    """Of the files of both encoders and their projections, not of TempNets."""
    image_size: int
    num_text_tokens: int
    vocab_size: int
    """Tokens that the text encoder knows."""

    @classmethod
    def read(cls, label: str, path: str) -> ModelSpec:
        """The specification of a dual encoder, which is loaded once to see that this is possible.

        Raises:
            ValueError: naming the path, if there is none.
        """
        if not Path(path).exists():
            raise ValueError(f"models: {path!r} is missing: there is no such directory")
        if not Path(path).is_dir():
            raise ValueError(f"models: {path!r} is no directory with a dual encoder or a Transformers CLIPModel")
        model = DualEncoder.from_pretrained(path)
        tokens: Any = model.text_encoder.get_input_embeddings()
        parts = [Path(path), Path(path, IMAGE_ENCODER_DIRECTORY), Path(path, TEXT_ENCODER_DIRECTORY)]
        return cls(
            label=label,
            path=str(Path(path).resolve()),
            digest=files_digest(
                file for part in parts if part.is_dir() for file in sorted(part.iterdir()) if file.is_file()
            ),
            image_size=model.config.image_size,
            num_text_tokens=model.config.num_text_tokens,
            vocab_size=tokens.num_embeddings,
        )

    @property
    def tokenizer(self) -> str:
        """Where its tokenizer is."""
        beside = Path(self.path, TEXT_ENCODER_DIRECTORY)
        return str(beside if beside.is_dir() else self.path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A run of images, or of texts, of one data set, to be encoded by one model."""

    model: ModelSpec
    data: str
    """Name of the data set."""
    modality: Literal["image", "text"]
    start: int
    stop: int
    """The images numbered start … stop − 1 of the data set, or as many of its texts."""
    texts: tuple[str, ...] = ()
    key: str

    @property
    def title(self) -> str:
        """For a person."""
        return f"{self.model.label} · {self.data} · {self.modality}s {self.start}–{self.stop - 1}"


def image_units(model: ModelSpec, precision: str, data: str, digest: str, num_images: int) -> list[Unit]:
    """The units of the images of a data set, whose digest says all about them."""
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


def text_units(model: ModelSpec, precision: str, data: str, texts: Sequence[str]) -> list[Unit]:
    """The units of the texts of a data set."""
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
    """What a unit, or several together, gave."""

    rows: np.ndarray
    """(n, d) unit rows, float32."""
    numbers: np.ndarray
    """(n,) int64, the number of each image or text in its data set."""
    problems: tuple[str, ...] = ()
    """Images that could not be read, and why."""

    @classmethod
    def join(cls, parts: Sequence[Embeddings]) -> Embeddings:
        """Those of several units, one after the other."""
        return cls(
            rows=np.concatenate([part.rows for part in parts]),
            numbers=np.concatenate([part.numbers for part in parts]),
            problems=tuple(problem for part in parts for problem in part.problems),
        )


class EmbeddingStore:
    """The embeddings in the directory of an evaluation (a path or a URI)."""

    def __init__(self, directory: str) -> None:
        self._directory = f"{directory}/embeddings"
        filesystem, path = resolve(self._directory)
        filesystem.create_dir(path, recursive=True)

    def has(self, unit: Unit) -> bool:
        """Whether the unit is finished."""
        filesystem, path = resolve(self._file(unit))
        return filesystem.get_file_info(path).type == FileType.File

    def read(self, unit: Unit) -> Embeddings:
        """Of a finished unit."""
        filesystem, path = resolve(self._file(unit))
        with filesystem.open_input_stream(path) as stream:
            arrays = safetensors.numpy.load(stream.read())
        problems = json.loads(arrays["problems"].tobytes())
        return Embeddings(rows=arrays["rows"], numbers=unit.start + arrays["numbers"], problems=tuple(problems))

    def write(self, unit: Unit, embeddings: Embeddings) -> None:
        """Finish a unit; a reader sees all of it or nothing."""
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
    """24 hex digits of all that decides the embeddings of a unit."""
    return hashlib.blake2b(json.dumps([_VERSION, *what]).encode(), digest_size=12).hexdigest()
