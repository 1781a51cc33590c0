"""Checkpoints: everything that a continued run needs to reproduce the uninterrupted one.

A checkpoint directory holds DeepSpeed's shards (both networks, both optimizers, schedules), what the task adds to them
(per-sample state), and `state.json` with the step and what identifies the run. Random numbers need no state: they are
seeded anew with every step. Ray Train merges the ranks' directories on upload. Nothing in it is ever unpickled beyond
tensors and plain containers.
"""

from __future__ import annotations

import copyreg
import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import ray.train
import torch
from deepspeed import DeepSpeedEngine
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address
from ray.train import Checkpoint, CheckpointUploadMode

from jobs.training.job import FatalTrainingError
from jobs.training.reshard import load_moments

# By its value, as Python 3.11.7 does; 3.11.2 (Debian 12) pickles members of an enum as a call of getattr, which
# `weights_only=True` rightly refuses.
copyreg.pickle(ZeroStageEnum, lambda stage: (ZeroStageEnum, (stage.value,)))

_TAG = "deepspeed"
_STATE_FILE = "state.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """Where a run stands after `step` optimizer steps; the data cursor is step · batch size."""

    step: int
    world_size: int
    seconds_trained: float
    num_units: int
    """Tokens (pairs) seen."""
    best_rating: float | None
    """Of the model that is exported so far; None if the last is to be exported, or nothing was yet."""
    unsent_metrics: list[list[Any]]
    """What MLflow had not received yet (`MetricLogger.unsent`): it would be lost with the process otherwise."""
    validations: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    """Step and scores of each so far."""


FRESH_STATE = RunState(step=0, world_size=0, seconds_trained=0.0, num_units=0, best_rating=None, unsent_metrics=[])


class SafeCheckpointEngine(TorchCheckpointEngine):
    """DeepSpeed's checkpoint files, read with `weights_only=True`."""

    def load(self, path: str, map_location: Any = None) -> Any:
        """Tensors, plain containers and DeepSpeed's own records only; anything else in the file is an error."""
        with torch.serialization.safe_globals([LossScaler, ZeroStageEnum, fragment_address]):
            return torch.load(path, map_location=map_location, weights_only=True)


def save_checkpoint(
    engine: DeepSpeedEngine,
    state: RunState,
    save_more: Callable[[Path], None],
    *,
    rank: int,
    metrics: dict[str, float],
) -> None:
    """Write this rank's part and hand it to Ray Train, which uploads it in the background. All ranks must call it."""
    directory = tempfile.mkdtemp(prefix="tempnet-checkpoint-")
    engine.save_checkpoint(directory, tag=_TAG, save_latest=False, exclude_frozen_parameters=True)
    save_more(Path(directory))
    if rank == 0:
        (Path(directory) / _STATE_FILE).write_text(json.dumps(asdict(state)))
    ray.train.report(
        metrics,
        checkpoint=Checkpoint.from_directory(directory),
        checkpoint_dir_name=f"checkpoint-{state.step:08d}",
        checkpoint_upload_mode=CheckpointUploadMode.ASYNC,
        delete_local_checkpoint_after_upload=True,
    )


def read_state(checkpoint: Checkpoint, *, world_size: int, zero_stage: int) -> RunState:
    """Where the checkpoint stands: all that is needed to start reading data.

    Raises:
        FatalTrainingError: if it was written by another number of workers under ZeRO 3, which divides the
            weights themselves.
    """
    with checkpoint.as_directory() as directory:
        state = RunState(**json.loads((Path(directory) / _STATE_FILE).read_text()))
    if state.world_size != world_size and zero_stage == 3:
        raise FatalTrainingError(
            f"the checkpoint of step {state.step} was written by {state.world_size} workers under ZeRO 3, this run has "
            f"workers.num_workers = {world_size}: continue with {state.world_size} (ZeRO 0, 1 and 2 take any number)"
        )
    return state


def load_checkpoint(
    engine: DeepSpeedEngine, checkpoint: Checkpoint, load_more: Callable[[Path, int], None], *, num_writers: int
) -> None:
    """Restore weights, optimizers, schedules and what `save_more` wrote.

    Args:
        num_writers: how many workers wrote it. The directory may also hold files of more workers, which were killed while
            they wrote the same step.
    """
    with checkpoint.as_directory() as directory:
        engine.checkpoint_engine = SafeCheckpointEngine()
        is_divided = num_writers != engine.dp_world_size and engine.zero_optimization()
        engine.load_checkpoint(directory, tag=_TAG, load_module_strict=False, load_optimizer_states=not is_divided)
        if is_divided:
            load_moments(
                engine,
                Path(directory) / _TAG,
                lambda file: engine.checkpoint_engine.load(file, map_location="cpu"),
                num_writers=num_writers,
            )
        load_more(Path(directory), num_writers)
