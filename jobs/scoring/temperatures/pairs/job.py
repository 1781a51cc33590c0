"""The job: prepared archives → parts of their pairs → a pool of models → tables; it writes only missing parts.

The tables depend neither on the number of workers nor on the order in which parts are finished. Images are resized and
centre-cropped, and captions are used as they were written: nothing is random.

Shapes: n pairs of a part, m images of it, S pixels per side, d size of the embedding.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from jobs.engine.cluster import start_ray
from jobs.scoring.config import PoolSection
from jobs.scoring.dual_encoders.encoder import Encoder, caption_encoder
from jobs.scoring.stages import ScoringFailedError, Stages, check_pool, run_stages
from jobs.scoring.temperatures.pairs.settings import PairPredictionSettings
from jobs.scoring.temperatures.tables import SUMMARY_FILE, existing_parts, part_file, write_part
from pipelines.images.captions import CaptionNoise
from pipelines.images.manifest import ImageManifest, read_index
from pipelines.images.pairs import PairSource
from pipelines.images.prepare import describe, prepare_images
from pipelines.images.temperature_table import read_table, table_schema
from pipelines.local_copy import local_copy
from pipelines.storage import write_json
from tempnet.models.dual_encoder import load_pair_tempnets
from tempnet.statistics import BOUND_SHARE

PREPARED_DIRECTORY = "_prepared"


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

    def __call__(self, decoded: _DecodedPart) -> tuple[_Part, pa.Table]:
        pairs = decoded.pairs
        # Copied because torch needs writable memory, and the object store's is not.
        image_rows, image_tau = self._predictor.images(decoded.images.copy())
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
        return decoded.part, pa.table(columns, schema=table_schema(size if self._with_embeddings else None))


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
    done = existing_parts(output)
    missing = [part for part in parts if part.file not in done]
    if len(missing) < len(parts):
        say(f"{output} holds {len(parts) - len(missing)} of {len(parts)} parts")
    num_pairs = 0

    def title(part: _Part) -> str:
        return f"{manifest.shards[part.shard].archive.rsplit('/', 1)[-1]} part {part.number}"

    def write(predicted: tuple[_Part, pa.Table]) -> int:
        part, table = predicted
        write_part(table, output, part.file)
        return int(table.num_rows)

    def keep(part: _Part, num_rows: int, seconds: float) -> str:
        nonlocal num_pairs
        num_pairs += num_rows
        return f"{num_rows} pairs, {num_rows / seconds:,.0f} pairs/s"

    source = PairSource(
        manifest=manifest, tokenizer=caption_encoder(settings.model).tokenizer, image_size=settings.model.image_size
    )
    stages: Stages[_Part] = Stages(
        read=partial(_read, source, settings.noise),
        model=partial(_PartPredictor, settings, workers.use_gpu),
        write=write,
    )
    failed = run_stages(stages, missing, workers, title=title, keep=keep, say=say)
    if failed:
        raise ScoringFailedError(failed)
    summary = _summary(settings, manifest, len(parts), output)
    write_json(f"{output}/{SUMMARY_FILE}", summary)
    return summary | {"num_pairs_now": num_pairs, "seconds_now": time.monotonic() - started}


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
