"""Dual encoders to be scored, the pairs that they read, and their embeddings, one file per unit.

A file is named by a hash of what decides its content but the batch size, the workers and the device, which affect only the
last digits.

Shapes: n samples, S side of the image, d size of the embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import safetensors.numpy
import torch

from jobs.engine.cluster import start_ray
from jobs.engine.fields import absolute_path
from jobs.scoring.headroom.config import Headroom
from jobs.scoring.temperatures.config import PredictPairTemperaturesConfig
from jobs.scoring.units import (
    Finished,
    ModelSpec,
    UnitStore,
    check_pool,
    holding_one,
    map_units,
    model_labels,
    unit_key,
)
from jobs.tasks.base import naming_field
from pipelines.archives import resolve_source
from pipelines.images.captions import CaptionEncoder
from pipelines.images.pairs import PairSource
from pipelines.images.prepare import PrepareImagesConfig, check_source, describe, prepare_images
from pipelines.local_copy import is_directory, local_copy
from pipelines.storage import compute_digest, join, relative
from pipelines.text.tokenization import load_tokenizer
from tempnet.fingerprints import files_digest
from tempnet.models.dual_encoder import DualEncoder
from tempnet.models.dual_encoder_config import IMAGE_ENCODER_DIRECTORY, TEXT_ENCODER_DIRECTORY

_DTYPES = {"fp32": None, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class DualEncoderSpec(ModelSpec):
    """Description of a dual encoder; its digest covers both encoders and their projections."""

    image_size: int
    """Side of the images in pixels."""
    num_text_tokens: int
    """Maximum number of tokens of a text; longer texts are cut."""
    embedding_size: int
    vocab_size: int

    @classmethod
    def read(cls, label: str, path: str, *, field: str = "models") -> DualEncoderSpec:
        """Returns the description of a dual encoder, which is loaded once to check that it can be."""
        with naming_field(f"{field}: "):
            place = Path(local_copy(path))
            if not place.is_dir():
                raise ValueError(f"{path!r} is missing: there is no such directory")
            model = DualEncoder.from_pretrained(place)
        tokens: Any = model.text_encoder.get_input_embeddings()
        parts = [place, place / IMAGE_ENCODER_DIRECTORY, place / TEXT_ENCODER_DIRECTORY]
        return cls(
            label=label,
            path=absolute_path(path),
            digest=files_digest(file for part in parts for file in sorted(part.glob("*")) if file.is_file()),
            image_size=model.config.image_size,
            num_text_tokens=model.config.num_text_tokens,
            embedding_size=model.config.embedding_size,
            vocab_size=tokens.num_embeddings,
        )

    def record(self) -> dict[str, Any]:
        """Returns the digest and the sizes of what the model reads, without its location."""
        return {f"model.{name}": getattr(self, name) for name in ("digest", "image_size", "num_text_tokens")}

    @property
    def tokenizer(self) -> str:
        beside = join(self.path, TEXT_ENCODER_DIRECTORY)
        return beside if is_directory(beside) else self.path


class Encoder:
    def __init__(self, spec: DualEncoderSpec, *, precision: str, batch_size: int, use_gpu: bool = False) -> None:
        self._device = torch.device("cuda" if use_gpu else "cpu")
        model = DualEncoder.from_pretrained(local_copy(spec.path), autocast_dtype=_DTYPES[precision])
        self._model = model.to(self._device)
        self._captions = caption_encoder(spec)
        self._path, self._batch_size = spec.path, batch_size

    @torch.inference_mode()
    def images(self, images: np.ndarray) -> np.ndarray:
        """Encode uint8 images (n, S, S, 3) into unit rows (n, d), float32; n may be 0."""
        rows = torch.empty(len(images), self._model.config.embedding_size)
        for start in range(0, len(images), self._batch_size):
            batch = slice(start, start + self._batch_size)
            rows[batch] = self._model.encode_images(torch.from_numpy(images[batch]).to(self._device)).cpu()
        return self._finite(rows, "images")

    @torch.inference_mode()
    def texts(self, texts: Sequence[str]) -> np.ndarray:
        """Encode n texts into unit rows (n, d), float32; those of similar length share a batch, without needless padding."""
        tokens = {name: torch.from_numpy(array) for name, array in self._captions.encode(texts).items()}
        rows = torch.empty(len(texts), self._model.config.embedding_size)
        for indices in tokens["attention_mask"].sum(1).argsort(stable=True).split(self._batch_size):
            is_needed = tokens["attention_mask"][indices].any(0)
            batch = {name: tensor[indices][:, is_needed].to(self._device) for name, tensor in tokens.items()}
            rows[indices] = self._model.encode_texts(**batch).cpu()
        return self._finite(rows, "texts")

    def _finite(self, rows: torch.Tensor, noun: str) -> np.ndarray:
        if bad := int((~rows.isfinite()).any(-1).sum()):
            raise ValueError(
                f"model = {self._path!r}: the embeddings of {bad} of {len(rows)} {noun} are NaN or infinite"
            )
        return rows.numpy()


def caption_encoder(spec: DualEncoderSpec, *, field: str = "models") -> CaptionEncoder:
    with naming_field(f"{field}: {spec.path!r} has no tokenizer: "):
        tokenizer = load_tokenizer(spec.tokenizer, needs_eos=False)
    if len(tokenizer) > spec.vocab_size:
        raise ValueError(
            f"{field}: the tokenizer in {spec.tokenizer!r} has {len(tokenizer)} tokens, the model {spec.vocab_size}"
        )
    return CaptionEncoder(tokenizer=tokenizer, num_text_tokens=spec.num_text_tokens)


def pairs_record(images: PrepareImagesConfig) -> dict[str, Any]:
    """Returns the archives of a source of pairs and their captions, without locations and the tolerated problems.

    Archives are identified by their sizes and times of modification (checksums detect one that changes while it is read), and
    a file of captions by all that it says. Errors are those of `check_source`.
    """
    archives, captions, _ = check_source(images)
    root = resolve_source(images.source)[1]
    versions = {
        f"archive {relative(one.path, root)} (bytes, files, version)": [one.num_bytes, len(one.files), one.version]
        for one in archives
    }
    return {
        "num_captioned_images": None if captions is None else len(captions.captions),
        "splits": list(images.splits),
        **({} if captions is None else {"captions": compute_digest(captions.captions)}),
        **({} if images.key_dot == "first" else {"key_dot": images.key_dot}),
        **versions,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class PairSettings:
    """Image–text pairs and the dual encoder that reads them, checked; local paths are absolute, for the workers."""

    format_version: ClassVar[int] = 2
    """Increased whenever the same settings would make other tables."""
    own_fields: ClassVar[tuple[str, ...]] = ()
    """Fields of the configuration that decide the tables."""
    config: Any
    images: PrepareImagesConfig
    model: DualEncoderSpec

    def record(self) -> dict[str, Any]:
        """Returns everything that decides the tables, as a flat mapping, without locations and the batch size."""
        return {
            "version": self.format_version,
            "kind": "image-text pairs",
            **{name: getattr(self.config, name) for name in self.own_fields},
            **self.model.record(),
            **pairs_record(self.images),
        }

    def prepare(self, output: str) -> PairSource:
        """Prepare the images beside the tables in `output`, unless they are, and return what reads them."""
        manifest = prepare_images(self.images, f"{output}/_prepared", max_bad_share_field="max_bad_share")
        return PairSource(
            manifest=manifest, tokenizer=caption_encoder(self.model).tokenizer, image_size=self.model.image_size
        )

    def begin(self, output: str) -> PairSource:
        """Start Ray, check that the pool fits before the images are prepared, and prepare them."""
        start_ray()
        check_pool(self.config.workers, reads=True)
        source = self.prepare(output)
        print(describe(source.manifest))
        return source


def pair_options(config: PredictPairTemperaturesConfig | Headroom) -> dict[str, Any]:
    """Returns the fields of `PairSettings` for a configuration."""
    images = PrepareImagesConfig(
        source=absolute_path(config.images),
        captions=absolute_path(config.captions),
        splits=config.splits,
        max_bad_share=config.max_bad_share,
        key_dot=config.key_dot,
    )
    with naming_field("images: "):
        check_source(images)
    (label,) = model_labels([config.model])
    model = DualEncoderSpec.read(label, config.model, field="model")
    caption_encoder(model, field="model")
    return {"config": config, "images": images, "model": model}


# Increase this whenever the same input would give other embeddings.
_VERSION = 4
NUM_IMAGES_PER_UNIT = 256
NUM_TEXTS_PER_UNIT = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodingUnit:
    """Consecutive images, or texts, of one data set, to be encoded by one model."""

    model: DualEncoderSpec
    data: str
    modality: Literal["image", "text"]
    start: int
    stop: int
    """The unit covers the images, or texts, with the numbers start … stop − 1 of the data set."""
    texts: tuple[str, ...] = ()
    key: str
    """Hash of everything that decides the embeddings, as 24 hex digits."""

    @property
    def file(self) -> str:
        return f"{self.key}.safetensors"

    @property
    def title(self) -> str:
        return f"{self.model.label} · {self.data} · {self.modality}s {self.start}–{self.stop - 1}"


def encoding_units(
    model: DualEncoderSpec, precision: str, data: str, pairs: PairSource, texts: Sequence[str]
) -> tuple[list[EncodingUnit], list[EncodingUnit]]:
    def unit(modality: Literal["image", "text"], start: int, size: int, total: int) -> EncodingUnit:
        stop = min(start + size, total)
        part = tuple(texts[start:stop]) if modality == "text" else ()
        what = [model.num_text_tokens, *part] if part else [model.image_size, pairs.manifest.digest, start, stop]
        key = unit_key([_VERSION, model.digest, precision, *what])
        return EncodingUnit(model=model, data=data, modality=modality, start=start, stop=stop, texts=part, key=key)

    num_images, num_texts = pairs.manifest.num_images, len(texts)
    images, captions = range(0, num_images, NUM_IMAGES_PER_UNIT), range(0, num_texts, NUM_TEXTS_PER_UNIT)
    return (
        [unit("image", start, NUM_IMAGES_PER_UNIT, num_images) for start in images],
        [unit("text", start, NUM_TEXTS_PER_UNIT, num_texts) for start in captions],
    )


def embedding_store(directory: str) -> UnitStore:
    """Returns the store of the embeddings of a job, given by its directory (a path or a URI)."""
    return UnitStore(f"{directory}/embeddings")


def read_embeddings(store: UnitStore, units: Sequence[EncodingUnit]) -> np.ndarray:
    """Read the embeddings of finished units, joined: unit rows (n, d), float32."""
    return np.concatenate([safetensors.numpy.load(store.read(unit.file))["rows"] for unit in units])


def _unit_encoder(**options: Any) -> Callable[[tuple[EncodingUnit, np.ndarray]], Finished]:
    """Returns what encodes a unit in a worker, given with its images (n, S, S, 3)."""
    load: Callable[[DualEncoderSpec], Encoder] = holding_one(lambda spec: Encoder(spec, **options))

    def encode(decoded: tuple[EncodingUnit, np.ndarray]) -> Finished:
        unit, images = decoded
        rows = load(unit.model).images(images) if unit.modality == "image" else load(unit.model).texts(unit.texts)
        return Finished(files={unit.file: safetensors.numpy.save({"rows": rows})}, num_cases=len(rows))

    return encode


def encode_missing(
    units: Sequence[EncodingUnit], sets: Mapping[str, PairSource], store: UnitStore, config: Any
) -> dict[str, str]:
    """Encode the units that the store lacks, and return title → reason for every unit that failed.

    The configuration has the workers, the batch size and the precision.
    """
    left = store.missing(list({unit.key: unit for unit in units}.values()))  # two data sets may have the same texts

    def read(unit: EncodingUnit) -> Iterator[tuple[EncodingUnit, np.ndarray]]:
        if unit.modality == "text":
            yield unit, np.empty(0, np.uint8)
        else:
            source = replace(sets[unit.data], image_size=unit.model.image_size)
            yield unit, source.read_images(range(unit.start, unit.stop))

    pool, options = config.workers, {"precision": config.precision, "batch_size": config.batch_size}
    model = partial(_unit_encoder, use_gpu=pool.use_gpu, **options)
    return map_units(left, model, pool, store, read=read, noun="samples").failed
