"""The Ray Data job: units → decoded images → a pool of encoders → the store; one pass over the data a model.

Reading with decoding and the encoders are stages that run at the same time. A unit goes through them as one row and is
written as soon as it is encoded, so that an interrupted evaluation goes on with the units that are left.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import ray
import ray.data
import torch
from ray.exceptions import RayError

from jobs.cluster import CPU_ENVIRONMENT
from jobs.clip_evaluation.config import EvaluateClipConfig
from jobs.clip_evaluation.encoder import Encoder
from jobs.clip_evaluation.images import ImageSet, read_images
from jobs.clip_evaluation.units import Embeddings, EmbeddingStore, ModelSpec, Unit

READ_CPUS = 0.5


class EvaluationFailedError(RuntimeError):
    """A unit failed; what was finished before is kept."""


class _Worker:
    """One of the pool: a row with the images of a unit in; their embeddings, or those of its texts, into the store."""

    def __init__(self, spec: ModelSpec, config: EvaluateClipConfig, shared: Any) -> None:
        torch.set_num_threads(max(1, int(config.workers.cpus_per_worker)))
        self._encoder = Encoder(
            spec, precision=config.precision, batch_size=config.batch_size, use_gpu=config.workers.use_gpu
        )
        self._units: Sequence[Unit] = ray.get(shared)[0]
        self._store = EmbeddingStore(config.run.directory)
        self._image_shape = (-1, spec.image_size, spec.image_size, 3)

    def __call__(self, rows: pa.Table) -> pa.Table:
        (row,) = rows.to_pylist()
        started = time.monotonic()
        unit = self._units[row["unit"]]
        if unit.modality == "image":
            images = np.frombuffer(row["images"], np.uint8).reshape(self._image_shape)
            numbers = np.frombuffer(row["numbers"], np.int64)
            embedded = Embeddings(
                rows=self._encoder.images(images), numbers=numbers, problems=tuple(json.loads(row["problems"]))
            )
        else:
            embedded = Embeddings(rows=self._encoder.texts(unit.texts), numbers=np.arange(unit.start, unit.stop))
        self._store.write(unit, embedded)
        return pa.table({"unit": [row["unit"]], "seconds": [time.monotonic() - started]})


def encode(config: EvaluateClipConfig, units: Sequence[Unit], sets: Mapping[str, ImageSet]) -> None:
    """Encode units and put them into the store of the evaluation; Ray must be running.

    Args:
        sets: the images of every data set, by name.

    Raises:
        EvaluationFailedError: with the reason.
    """
    num_done, started = 0, time.monotonic()
    for spec in dict.fromkeys(unit.model for unit in units):
        own = [unit for unit in units if unit.model == spec]
        # Closing stops Ray Data's executor when this loop is left early.
        with contextlib.closing(_rows(config, spec, own, sets)) as rows:
            for row in rows:
                num_done += 1
                left = (time.monotonic() - started) / num_done * (len(units) - num_done)
                print(
                    f"{num_done:>{len(str(len(units)))}}/{len(units)}  {own[row['unit']].title}  {row['seconds']:.1f} s  "
                    f"{int(left) // 60}:{int(left) % 60:02d} left",
                    flush=True,
                )


def _rows(
    config: EvaluateClipConfig, spec: ModelSpec, units: Sequence[Unit], sets: Mapping[str, ImageSet]
) -> Iterator[dict[str, Any]]:
    """A row for every finished unit: its number and the encoder's seconds."""
    # Put once: captured by the functions, they would travel with every task.
    shared = ray.put((units, dict(sets)))
    size = spec.image_size

    def read(row: dict[str, Any]) -> dict[str, Any]:
        units, sets = ray.get(shared)
        unit = units[row["unit"]]
        if unit.modality == "text":
            return {**row, "images": b"", "numbers": b"", "problems": "[]"}
        images, numbers, problems = read_images(sets[unit.data], range(unit.start, unit.stop), size)
        return {**row, "images": images.tobytes(), "numbers": numbers.tobytes(), "problems": json.dumps(problems)}

    logging.getLogger("ray.data").setLevel(logging.ERROR)
    rows = ray.data.from_items([{"unit": number} for number in range(len(units))], override_num_blocks=len(units))
    rows.context.enable_progress_bars = False
    # A block is as small as can be, one unit: encoders need not wait for others.
    rows.context.target_max_block_size = 1
    encoded = rows.map(read, num_cpus=READ_CPUS).map_batches(
        _Worker,
        batch_size=1,
        batch_format="pyarrow",
        fn_constructor_args=(spec, config, shared),
        compute=ray.data.ActorPoolStrategy(size=min(config.workers.num_workers, len(units))),
        num_cpus=config.workers.cpus_per_worker,
        num_gpus=1 if config.workers.use_gpu else None,
        runtime_env={"env_vars": CPU_ENVIRONMENT},
    )
    try:
        yield from encoded.iter_rows()
    except RayError as error:
        reason = str(getattr(error, "cause", None) or error).strip()
        raise EvaluationFailedError(f"{spec.label}: {reason}") from error
