"""Checkpoints: everything that a continued run needs to reproduce the uninterrupted one.

A checkpoint directory holds DeepSpeed's shards (both networks, both optimizers, schedules), the random state of every
rank, and `state.json` with the step and what identifies the run. Ray Train merges the ranks' directories on upload.
Nothing in it is ever unpickled beyond tensors and plain containers.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict, dataclass
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

_TAG = "deepspeed"
_STATE_FILE = "state.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """Where a run stands after `step` optimizer steps; the data cursor is step · batch size."""

    step: int
    world_size: int
    seconds_trained: float
    num_tokens: int
    """Targets seen."""
    unsent_metrics: list[list[Any]]
    """What MLflow had not received yet (`MetricLogger.unsent`): it would be lost with the process otherwise."""


FRESH_STATE = RunState(step=0, world_size=0, seconds_trained=0.0, num_tokens=0, unsent_metrics=[])


class SafeCheckpointEngine(TorchCheckpointEngine):
    """DeepSpeed's checkpoint files, read with `weights_only=True`."""

    def load(self, path: str, map_location: Any = None) -> Any:
        """Tensors, plain containers and DeepSpeed's own records only; anything else in the file is an error."""
        with torch.serialization.safe_globals([LossScaler, ZeroStageEnum, fragment_address]):
            return torch.load(path, map_location=map_location, weights_only=True)


def save_checkpoint(engine: DeepSpeedEngine, state: RunState, *, rank: int, metrics: dict[str, float]) -> None:
    """Write this rank's part and hand it to Ray Train, which uploads it in the background. All ranks must call it."""
    directory = tempfile.mkdtemp(prefix="tempnet-checkpoint-")
    engine.save_checkpoint(directory, tag=_TAG, save_latest=False, exclude_frozen_parameters=True)
    random_state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        random_state["cuda"] = torch.cuda.get_rng_state()
    torch.save(random_state, Path(directory) / f"random-{rank:05d}.pt")
    if rank == 0:
        (Path(directory) / _STATE_FILE).write_text(json.dumps(asdict(state)))
    ray.train.report(
        metrics,
        checkpoint=Checkpoint.from_directory(directory),
        checkpoint_dir_name=f"checkpoint-{state.step:08d}",
        checkpoint_upload_mode=CheckpointUploadMode.ASYNC,
        delete_local_checkpoint_after_upload=True,
    )


def read_state(checkpoint: Checkpoint, *, world_size: int) -> RunState:
    """Where the checkpoint stands: all that is needed to start reading data.

    Raises:
        ValueError: if it was written by another number of workers.
    """
    with checkpoint.as_directory() as directory:
        state = RunState(**json.loads((Path(directory) / _STATE_FILE).read_text()))
    if state.world_size != world_size:
        raise ValueError(
            f"the checkpoint of step {state.step} was written by {state.world_size} workers, this run has "
            f"workers.num_workers = {world_size}: continue with {state.world_size}"
        )
    return state


def load_checkpoint(engine: DeepSpeedEngine, checkpoint: Checkpoint, *, rank: int) -> None:
    """Restore weights, optimizers, schedules and random state of this rank."""
    with checkpoint.as_directory() as directory:
        engine.checkpoint_engine = SafeCheckpointEngine()
        engine.load_checkpoint(directory, tag=_TAG, load_module_strict=False)
        random_state = torch.load(Path(directory) / f"random-{rank:05d}.pt", weights_only=True)
        torch.set_rng_state(random_state["cpu"])
        if "cuda" in random_state:
            torch.cuda.set_rng_state(random_state["cuda"])
