"""The Ray Data job that encodes units: decode images → encode in a pool of workers → write to the store.

Decoding and encoding are stages that run at the same time. A unit passes through them as one row, and the driver writes
it as soon as it is encoded, so that an interrupted evaluation continues with the remaining units.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import ray
import ray.data
import torch
from ray.exceptions import RayError

from jobs.engine.cluster import CPU_ENVIRONMENT
from jobs.engine.console import clock
from jobs.scoring.dual_encoders.config import EvaluateClipConfig
from jobs.scoring.dual_encoders.encoder import Encoder
from jobs.scoring.dual_encoders.images import ImageSet, read_images
from jobs.scoring.dual_encoders.units import Embeddings, EmbeddingStore, ModelSpec, Unit
from jobs.scoring.language_models.errors import EvaluationFailedError

READ_CPUS = 0.5


class _Worker:
    """A worker of the pool: takes a row with one unit's images or texts, and returns a row with their embeddings.

    It holds one model at a time. Rows arrive roughly in the order of the models, so models are rarely reloaded.
    """

    def __init__(self, models: Sequence[ModelSpec], config: EvaluateClipConfig) -> None:
        torch.set_num_threads(max(1, int(config.workers.cpus_per_worker)))
        self._models = models
        self._config = config
        self._loaded: tuple[int, Encoder] | None = None

    def __call__(self, rows: pa.Table) -> pa.Table:
        (row,) = rows.to_pylist()
        started = time.monotonic()
        embedded, error = np.empty((0, 0), np.float32), row["error"]
        if not error:
            try:
                embedded = self._embed(row)
            except (OSError, ValueError, RuntimeError) as reason:
                error = f"{type(reason).__name__}: {reason}"
        return (
            rows.drop_columns(["images", "texts", "error"])
            .append_column("error", pa.array([error]))
            .append_column("embeddings", pa.array([embedded.tobytes()], pa.large_binary()))
            .append_column("size", pa.array([embedded.shape[1]]))
            .append_column("seconds", pa.array([time.monotonic() - started]))
        )

    def _embed(self, row: dict[str, Any]) -> np.ndarray:
        """Returns the (n, d) embeddings of a unit's images or texts."""
        encoder = self._encoder(row["model"])
        if texts := json.loads(row["texts"]):
            return encoder.texts(texts)
        size = self._models[row["model"]].image_size
        # Copied because torch needs writable memory.
        images = np.frombuffer(bytearray(row["images"]), np.uint8).reshape(-1, size, size, 3)
        return encoder.images(images)

    def _encoder(self, number: int) -> Encoder:
        if self._loaded is None or self._loaded[0] != number:
            self._loaded = None  # free the previous model first
            config = self._config
            encoder = Encoder(
                self._models[number],
                precision=config.precision,
                batch_size=config.batch_size,
                use_gpu=config.workers.use_gpu,
            )
            self._loaded = (number, encoder)
        return self._loaded[1]


def encode(
    config: EvaluateClipConfig, units: Sequence[Unit], sets: Mapping[str, ImageSet], store: EmbeddingStore
) -> None:
    """Encode units, and put each into the store as soon as it is finished. Ray must be running.

    Args:
        config: the configuration of the evaluation.
        units: the units to encode.
        sets: the images of every data set, by name.
        store: where the embeddings go.

    Raises:
        EvaluationFailedError: with the reason, if a unit or a worker failed.
    """
    num_done, started = 0, time.monotonic()
    # Closing the generator stops Ray Data's executor if this loop is left early.
    with contextlib.closing(_rows(config, units, sets)) as rows:
        for row in rows:
            unit = units[row["unit"]]
            if row["error"]:
                raise EvaluationFailedError(f"{unit.title}: {row['error']}")
            store.write(unit, _embeddings(row))
            num_done += 1
            left = (time.monotonic() - started) / num_done * (len(units) - num_done)
            print(
                f"{num_done:>{len(str(len(units)))}}/{len(units)}  {unit.title}  {row['seconds']:.1f} s  "
                f"{clock(left)} left",
                flush=True,
            )


def _embeddings(row: dict[str, Any]) -> Embeddings:
    numbers = np.frombuffer(row["numbers"], np.int64)
    rows = np.frombuffer(row["embeddings"], np.float32).reshape(len(numbers), row["size"])
    return Embeddings(rows=rows, numbers=numbers, problems=tuple(json.loads(row["problems"])))


def _rows(
    config: EvaluateClipConfig, units: Sequence[Unit], sets: Mapping[str, ImageSet]
) -> Generator[dict[str, Any], None, None]:
    """Yields a row for every finished unit: its number, its embeddings or error, and the encoding time in seconds."""
    models = list(dict.fromkeys(unit.model for unit in units))
    # Put into the object store once; as a captured variable it would be sent with every task.
    shared = ray.put((units, dict(sets)))

    def read(row: dict[str, Any]) -> dict[str, Any]:
        units, sets = ray.get(shared)
        unit = units[row["unit"]]
        images, numbers, error = b"", np.arange(unit.start, unit.stop), ""
        problems: list[str] = []
        if unit.modality == "image":
            try:
                pixels, numbers, problems = read_images(sets[unit.data], numbers.tolist(), unit.model.image_size)
                images = pixels.tobytes()
            except OSError as reason:
                error = str(reason)
        return {
            **row,
            "images": images,
            "texts": json.dumps(unit.texts),
            "numbers": numbers.tobytes(),
            "problems": json.dumps(problems),
            "error": error,  # returned as a value, since Ray Data would hide a raised error under its own
        }

    logging.getLogger("ray.data").setLevel(logging.ERROR)
    items = [{"unit": number, "model": models.index(unit.model)} for number, unit in enumerate(units)]
    rows = ray.data.from_items(items, override_num_blocks=len(units))
    rows.context.enable_progress_bars = False
    # Blocks are as small as possible, one unit each, so that encoders need not wait for other units.
    rows.context.target_max_block_size = 1
    encoded = rows.map(read, num_cpus=READ_CPUS).map_batches(
        _Worker,
        batch_size=1,
        batch_format="pyarrow",
        fn_constructor_args=(models, config),
        compute=ray.data.ActorPoolStrategy(size=min(config.workers.num_workers, len(units))),
        num_cpus=config.workers.cpus_per_worker,
        num_gpus=1 if config.workers.use_gpu else None,
        runtime_env={"env_vars": CPU_ENVIRONMENT},
    )
    try:
        yield from encoded.iter_rows()
    except RayError as error:
        reason = str(getattr(error, "cause", None) or error).strip()
        raise EvaluationFailedError(f"a worker failed: {reason}") from error
