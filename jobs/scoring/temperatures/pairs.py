"""Temperatures of image–text pairs: checked settings, and prepared archives → parts of their pairs → a pool → tables.

A job that is started again writes only the missing parts. The tables depend neither on the number of workers nor on the
order in which parts are finished. Images are resized and centre-cropped, and captions are used as they were written:
nothing is random. All checks that need no images happen before Ray is started.

Shapes: n pairs of a part, m images of it, S pixels per side, d size of the embedding.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import torch

from jobs.engine.cluster import start_ray
from jobs.engine.fields import absolute_path
from jobs.engine.fingerprints import tempnet_digest
from jobs.scoring.config import PoolSection
from jobs.scoring.dual_encoders.data import model_record, pairs_record, resolve_pairs
from jobs.scoring.dual_encoders.encoder import DualEncoderSpec, Encoder, caption_encoder
from jobs.scoring.temperatures.config import SUMMARY_FILE, PredictPairTemperaturesConfig
from jobs.scoring.units import Finished, UnitStore, Work, check_pool, map_units, part_file, to_parquet
from jobs.tasks.base import naming_field
from pipelines.images.captions import CaptionNoise
from pipelines.images.manifest import ImageManifest, read_index
from pipelines.images.pairs import PairSource
from pipelines.images.prepare import PrepareImagesConfig, describe, prepare_images
from pipelines.images.temperature_table import read_table, table_schema
from pipelines.local_copy import local_copy
from pipelines.storage import write_json
from tempnet.models.dual_encoder import (
    IMAGE_TEMPNET_DIRECTORY,
    TEXT_TEMPNET_DIRECTORY,
    DualEncoder,
    load_pair_tempnets,
)
from tempnet.network import TempNet
from tempnet.statistics import BOUND_SHARE

FORMAT_VERSION = 1
PREPARED_DIRECTORY = "_prepared"


@dataclass(frozen=True, slots=True, kw_only=True)
class PairPredictionSettings:
    """Settings for the workers; local paths are absolute, because a worker has its own working directory."""

    images: PrepareImagesConfig
    model: DualEncoderSpec
    tempnet: str
    batch_size: int
    precision: Literal["fp32", "bf16"]
    part_pairs: int
    with_embeddings: bool
    tau_ranges: tuple[tuple[float, float], tuple[float, float]]
    """[τ₀, τ_max] at inference, for images and for texts."""
    tempnet_digests: tuple[str, str]
    noise: CaptionNoise = field(default_factory=CaptionNoise)
    """Noise that is added to the captions before their temperatures are predicted."""

    def record(self) -> dict[str, Any]:
        """Returns everything that decides the table, as a flat mapping.

        The locations of files, the batch size and the tolerated share of problems do not belong to it. The contents of
        archives are identified by their sizes; an archive that changes while it is read is detected by checksums.
        """
        names = ("precision", "part_pairs", "with_embeddings")
        return {
            "version": FORMAT_VERSION,
            "kind": "image-text pairs",
            **{name: getattr(self, name) for name in names},
            **model_record(self.model),
            "tempnet_image": self.tempnet_digests[0],
            "tempnet_text": self.tempnet_digests[1],
            **({"caption_noise": [self.noise.share, self.noise.seed]} if self.noise.share else {}),
            **pairs_record(self.images),
        }


def resolve_settings(config: PredictPairTemperaturesConfig) -> PairPredictionSettings:
    """Returns the settings for a configuration.

    Raises:
        FileNotFoundError, OSError: if images, captions, the model or a TempNet are missing.
        ValueError: if they do not fit together.
    """
    tempnet = config.tempnet or config.model
    with naming_field("tempnet = " if config.tempnet else "model = "):
        networks = load_pair_tempnets(local_copy(tempnet))
    images, model = resolve_pairs(config)
    embedding_size = DualEncoder.from_pretrained(local_copy(model.path)).config.embedding_size
    for name, network in zip((IMAGE_TEMPNET_DIRECTORY, TEXT_TEMPNET_DIRECTORY), networks, strict=True):
        if network.config.kind != "embeddings" or network.config.input_size != embedding_size:
            raise ValueError(
                f"{tempnet}/{name} reads {network.config.input_size} {network.config.kind}, the embeddings of "
                f"{config.model} have a size of {embedding_size}"
            )
    return PairPredictionSettings(
        images=images,
        model=model,
        tempnet=absolute_path(tempnet),
        batch_size=config.batch_size,
        precision=config.precision,
        part_pairs=config.part_pairs,
        with_embeddings=config.with_embeddings,
        tau_ranges=(_tau_range(networks[0]), _tau_range(networks[1])),
        tempnet_digests=(tempnet_digest(networks[0]), tempnet_digest(networks[1])),
    )


def _tau_range(network: TempNet) -> tuple[float, float]:
    config = network.config
    return config.tau_min, config.tau_max if config.tau_max_eval is None else config.tau_max_eval


@dataclass(frozen=True, slots=True)
class _Part:
    """Consecutive pairs of one archive."""

    shard: int
    """Position of the archive in the manifest."""
    number: int
    """Position of the part in its archive."""
    start: int
    stop: int
    """The part covers the rows start … stop − 1 of the archive's index."""

    @property
    def file(self) -> str:
        return part_file(self.shard, self.number)


@dataclass(frozen=True, slots=True)
class _DecodedPart:
    part: _Part
    pairs: pa.Table
    """`id`, `key`, `caption`, and `image`, the position among the images of this part."""
    images: np.ndarray
    """uint8 (m, S, S, 3)."""


class PairPredictor:
    """Computes embeddings and temperatures of images and captions, with encoders and TempNets in evaluation mode."""

    def __init__(self, settings: PairPredictionSettings, *, use_gpu: bool = False) -> None:
        self._encoder = Encoder(
            settings.model, precision=settings.precision, batch_size=settings.batch_size, use_gpu=use_gpu
        )
        self._tempnets = load_pair_tempnets(local_copy(settings.tempnet))

    @torch.inference_mode()
    def images(self, images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """uint8 images (m, S, S, 3) → unit rows (m, d) and τ (m,), float32."""
        rows = self._encoder.images(images)
        return rows, self._tempnets[0](torch.from_numpy(rows)).numpy()

    @torch.inference_mode()
    def texts(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """n texts → unit rows (n, d) and τ (n,), float32."""
        rows = self._encoder.texts(texts)
        return rows, self._tempnets[1](torch.from_numpy(rows)).numpy()


class _PartPredictor:
    """Makes the tables of parts, in a worker."""

    def __init__(self, settings: PairPredictionSettings, use_gpu: bool) -> None:
        self._predictor = PairPredictor(settings, use_gpu=use_gpu)
        self._with_embeddings = settings.with_embeddings

    def __call__(self, decoded: _DecodedPart) -> Finished:
        pairs = decoded.pairs
        image_rows, image_tau = self._predictor.images(decoded.images)
        text_rows, text_tau = self._predictor.texts(pairs["caption"].to_pylist())
        of_pair = pairs["image"].to_numpy()
        columns: dict[str, Any] = {name: pairs[name] for name in ("id", "key", "caption")}
        columns |= {"tau_image": image_tau[of_pair], "tau_text": text_tau}
        size = image_rows.shape[1]
        if self._with_embeddings:
            columns |= {
                name: pa.FixedSizeListArray.from_arrays(embeddings.ravel(), size)
                for name, embeddings in (("image_embedding", image_rows[of_pair]), ("text_embedding", text_rows))
            }
        table = pa.table(columns, schema=table_schema(size if self._with_embeddings else None))
        return Finished(files={decoded.part.file: to_parquet(table)}, num_cases=table.num_rows)


def predict_pairs(
    settings: PairPredictionSettings, output: str, workers: PoolSection, *, say: Callable[[str], None] = print
) -> dict[str, Any]:
    """Write the missing parts in `output` and the summary, and return the summary; Ray is started if needed.

    Args:
        settings: the checked settings.
        output: directory or URI of the table.
        workers: number and resources of the worker processes.
        say: called with one line of text for every finished part.

    Raises:
        ValueError: if the cluster can never provide the workers.
        TooManyProblemsError: if too many samples are unreadable; in that case nothing has been predicted.
        ScoringFailedError: naming every part that failed; the parts that were finished are kept.
    """
    started = time.monotonic()
    start_ray()
    check_pool(workers, reads=True)  # before the images are prepared
    manifest = prepare_images(settings.images, f"{output}/{PREPARED_DIRECTORY}", max_bad_share_field="max_bad_share")
    say(describe(manifest))
    parts = _parts(manifest, settings.part_pairs)
    store = UnitStore(output)
    done = store.parts()
    missing = [part for part in parts if part.file not in done]
    if len(missing) < len(parts):
        say(f"{output} holds {len(parts) - len(missing)} of {len(parts)} parts")
    source = PairSource(
        manifest=manifest, tokenizer=caption_encoder(settings.model).tokenizer, image_size=settings.model.image_size
    )
    work: Work[_Part] = Work(
        read=partial(_read, source, settings.noise),
        model=partial(_PartPredictor, settings, workers.use_gpu),
        title=lambda part: f"{manifest.shards[part.shard].archive.rsplit('/', 1)[-1]} part {part.number}",
        noun="pairs",
    )
    outcome = map_units(missing, work, workers, store, say=say)
    outcome.check()
    summary = _summary(settings, manifest, len(parts), output)
    write_json(f"{output}/{SUMMARY_FILE}", summary)
    return summary | {"num_pairs_now": outcome.num_cases, "seconds_now": time.monotonic() - started}


def _parts(manifest: ImageManifest, part_pairs: int) -> list[_Part]:
    return [
        _Part(shard, number, start, min(start + part_pairs, size))
        for shard, size in enumerate(manifest.shard_sizes)
        for number, start in enumerate(range(0, size, part_pairs))
    ]


def _read(source: PairSource, noise: CaptionNoise, part: _Part) -> Iterator[_DecodedPart]:
    index = read_index(source.manifest, part.shard).slice(part.start, part.stop - part.start)
    numbers, image = np.unique(index["image"].to_numpy(), return_inverse=True)
    first = int(source.manifest.first_pairs[part.shard])
    ids = range(first + part.start, first + part.stop)
    pairs = pa.table(
        {
            "id": np.arange(ids.start, ids.stop),
            "key": index["key"],
            "caption": [
                noise.apply(text, pair)[0] for text, pair in zip(index["caption"].to_pylist(), ids, strict=True)
            ],
            "image": image,
        }
    )
    yield _DecodedPart(part, pairs, source.read_images(numbers))


def _summary(settings: PairPredictionSettings, manifest: ImageManifest, num_parts: int, output: str) -> dict[str, Any]:
    """Returns the content of `_summary.json`: counts, figures of τ over all pairs, problems by kind, and settings."""
    return {
        "num_pairs": manifest.num_pairs,
        "num_images": manifest.num_images,
        "num_parts": num_parts,
        **_figures(output, settings),
        "problems": dict(manifest.problems),
        "data_digest": manifest.digest,
        "settings": settings.record(),
    }


def _figures(output: str, settings: PairPredictionSettings) -> dict[str, float]:
    """Returns the mean and standard deviation of τ, and the shares at either bound, for images and for texts."""
    names = ("tau_image", "tau_text")
    table = read_table(output, list(names))
    figures: dict[str, float] = {}
    for name, (low, high) in zip(names, settings.tau_ranges, strict=True):
        tau = table[name].to_numpy().astype(np.float64)
        margin = BOUND_SHARE * (high - low)
        figures |= {
            f"{name}_mean": float(tau.mean()),
            f"{name}_std": math.sqrt(tau.var()),
            f"{name}_share_lower_bound": float((tau <= low + margin).mean()),
            f"{name}_share_upper_bound": float((tau >= high - margin).mean()),
        }
    return figures
