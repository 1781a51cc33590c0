"""The Ray Data job: prepared archives → parts of their pairs → a pool of models → tables; it writes only missing parts.

Decoding, the models and writing are stages that run at the same time. A part passes through them as one row, so the
tables depend neither on the number of workers nor on the order in which parts are finished. Images are resized and
centre-cropped, and captions are used as they were written: nothing is random.

Shapes: n pairs of a part, m images of it, S pixels per side, d size of the embedding.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Generator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import ray
import ray.data
import torch
from pyarrow.fs import FileType
from ray.exceptions import RayError

from jobs.engine.cluster import CPU_ENVIRONMENT, check_resources, start_ray
from jobs.scoring.dual_encoders.encoder import Encoder, caption_encoder
from jobs.scoring.temperatures.pairs.settings import PairPredictionSettings
from jobs.scoring.temperatures.texts.config import PredictionWorkers
from jobs.scoring.temperatures.texts.parts import from_bytes, part_file, to_bytes
from pipelines.images.manifest import ImageManifest, read_index
from pipelines.images.pairs import PairSource
from pipelines.images.prepare import describe, prepare_images
from pipelines.images.temperature_table import read_table, table_schema
from pipelines.storage import resolve, write_json
from tempnet.models.dual_encoder import load_pair_tempnets
from tempnet.statistics import BOUND_SHARE

SUMMARY_FILE = "_summary.json"
PREPARED_DIRECTORY = "_prepared"
_READ_CPUS = 0.5
_WRITE_CPUS = 0.5


class PairPredictionFailedError(RuntimeError):
    """A part failed; the parts that were finished before are kept."""


class PairPredictor:
    """Computes embeddings and temperatures of images and captions, with encoders and TempNets in evaluation mode."""

    def __init__(self, settings: PairPredictionSettings, *, use_gpu: bool = False) -> None:
        self._encoder = Encoder(
            settings.model, precision=settings.precision, batch_size=settings.batch_size, use_gpu=use_gpu
        )
        self._tempnets = load_pair_tempnets(settings.tempnet)

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


class _Worker:
    """A worker of the pool: takes a row with the pairs of one part, and returns a row with their table."""

    def __init__(self, settings: PairPredictionSettings, workers: PredictionWorkers) -> None:
        torch.set_num_threads(max(1, int(workers.cpus_per_worker)))
        self._predictor = PairPredictor(settings, use_gpu=workers.use_gpu)
        size = settings.model.image_size
        self._image_shape = (-1, size, size, 3)
        self._with_embeddings = settings.with_embeddings

    def __call__(self, rows: pa.Table) -> pa.Table:
        pairs = from_bytes(rows["pairs"][0].as_py())
        started = time.monotonic()
        # Copied because torch needs writable memory.
        images = np.frombuffer(bytearray(rows["images"][0].as_py()), np.uint8).reshape(self._image_shape)
        image_rows, image_tau = self._predictor.images(images)
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
        return (
            rows.drop_columns(["images", "pairs"])
            .append_column("table", pa.array([to_bytes(table)], pa.large_binary()))
            .append_column("seconds", pa.array([time.monotonic() - started]))
        )


def predict_pairs(
    settings: PairPredictionSettings, output: str, workers: PredictionWorkers, *, say: Callable[[str], None] = print
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
        PairPredictionFailedError: with the reason, if a part failed.
    """
    started = time.monotonic()
    start_ray()
    check_resources(
        num_workers=workers.num_workers,
        cpus_per_worker=workers.cpus_per_worker,
        use_gpu=workers.use_gpu,
        data_cpus=_READ_CPUS + _WRITE_CPUS,
    )
    manifest = prepare_images(settings.images, f"{output}/{PREPARED_DIRECTORY}", max_bad_share_field="max_bad_share")
    say(describe(manifest))
    parts = _parts(manifest, settings.part_pairs)
    missing = [part for part in parts if not _is_written(output, part)]
    if len(missing) < len(parts):
        say(f"{output} holds {len(parts) - len(missing)} of {len(parts)} parts")
    num_pairs = 0
    if missing:
        # Closing the generator stops Ray Data's executor if this loop is left early.
        with contextlib.closing(_finished_parts(settings, manifest, missing, output, workers)) as rows:
            for row in rows:
                num_pairs += row["num_pairs"]
                name = manifest.shards[row["shard"]].archive.rsplit("/", 1)[-1]
                rate = row["num_pairs"] / row["seconds"]
                say(f"{name} part {row['part']}: {row['num_pairs']} pairs, {rate:,.0f} pairs/s")
    summary = {
        "num_pairs": manifest.num_pairs,
        "num_images": manifest.num_images,
        "num_parts": len(parts),
        **_figures(output, settings),
        "problems": dict(manifest.problems),
        "data_digest": manifest.digest,
        "settings": settings.record(),
    }
    write_json(f"{output}/{SUMMARY_FILE}", summary)
    return summary | {"num_pairs_now": num_pairs, "seconds_now": time.monotonic() - started}


def _parts(manifest: ImageManifest, part_pairs: int) -> list[dict[str, int]]:
    """Returns every part's shard, its number within the shard, and its rows start … stop − 1 of the shard's index."""
    return [
        {"shard": shard, "part": part, "start": start, "stop": min(start + part_pairs, size)}
        for shard, size in enumerate(manifest.shard_sizes)
        for part, start in enumerate(range(0, size, part_pairs))
    ]


def _is_written(output: str, part: dict[str, int]) -> bool:
    filesystem, path = resolve(f"{output}/{part_file(part['shard'], part['part'])}")
    return filesystem.get_file_info(path).type == FileType.File


def _finished_parts(
    settings: PairPredictionSettings,
    manifest: ImageManifest,
    parts: list[dict[str, int]],
    output: str,
    workers: PredictionWorkers,
) -> Generator[dict[str, Any], None, None]:
    """Yields a row with shard, part, number of pairs and the model's seconds for every part, as it is finished."""
    source = PairSource(
        manifest=manifest, tokenizer=caption_encoder(settings.model).tokenizer, image_size=settings.model.image_size
    )
    shared = ray.put(source)  # put once; as a captured variable it would be sent with every task

    def read(row: dict[str, Any]) -> dict[str, Any]:
        source = ray.get(shared)
        start, stop = row["start"], row["stop"]
        index = read_index(source.manifest, row["shard"]).slice(start, stop - start)
        numbers, image = np.unique(index["image"].to_numpy(), return_inverse=True)
        first = int(source.manifest.first_pairs[row["shard"]])
        pairs = pa.table(
            {
                "id": np.arange(first + start, first + stop),
                "key": index["key"],
                "caption": index["caption"],
                "image": image,  # the position among the images of this part
            }
        )
        images = source.read_images(numbers)
        return {**{name: row[name] for name in ("shard", "part")}, "pairs": to_bytes(pairs), "images": images.tobytes()}

    def write(row: dict[str, Any]) -> dict[str, Any]:
        table = from_bytes(row["table"])
        name = part_file(row["shard"], row["part"])
        filesystem, path = resolve(output)
        # The leading underscore hides a partial file from readers of the directory.
        pq.write_table(table, f"{path}/_{name}.partial", filesystem=filesystem, compression="zstd")
        filesystem.move(f"{path}/_{name}.partial", f"{path}/{name}")
        return {**{name: row[name] for name in ("shard", "part", "seconds")}, "num_pairs": table.num_rows}

    logging.getLogger("ray.data").setLevel(logging.ERROR)
    rows = ray.data.from_items(parts, override_num_blocks=len(parts))
    rows.context.enable_progress_bars = False
    # Blocks are as small as possible, one part each, so that models need not wait for other parts.
    rows.context.target_max_block_size = 1
    written = (
        rows.map(read, num_cpus=_READ_CPUS)
        .map_batches(
            _Worker,
            batch_size=1,
            batch_format="pyarrow",
            fn_constructor_args=(settings, workers),
            compute=ray.data.ActorPoolStrategy(size=min(workers.num_workers, len(parts))),
            num_cpus=workers.cpus_per_worker,
            num_gpus=1 if workers.use_gpu else None,
            runtime_env={"env_vars": CPU_ENVIRONMENT},
        )
        .map(write, num_cpus=_WRITE_CPUS)
    )
    try:
        yield from written.iter_rows()
    except RayError as error:
        raise PairPredictionFailedError(str(getattr(error, "cause", None) or error).strip()) from error


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
