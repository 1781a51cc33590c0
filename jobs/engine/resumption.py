"""Which checkpoint a run goes on from: the newest that is whole.

Ray Train goes on from the newest checkpoint that its snapshot file names, whatever is left of it. Here the checkpoints'
own directories decide, and the snapshot is written anew from them before every start. A snapshot that is damaged, missing
or of another version of Ray therefore costs nothing, and a damaged checkpoint costs the steps since the one before it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from pipelines.storage import read_json, resolve, write_json
from pyarrow.fs import FileSelector, FileType
from ray.train.v2._internal.constants import CHECKPOINT_MANAGER_SNAPSHOT_FILENAME as SNAPSHOT_FILE
from ray.train.v2._internal.execution.checkpoint.checkpoint_manager import (
    _CheckpointManagerState,
    _TrainingResultState,
)

from jobs.engine.checkpoint_files import find_damage

_NAME = re.compile(r"checkpoint-(\d+)")


def checkpoint_name(step: int) -> str:
    """Name of the directory of a step's checkpoint."""
    return f"checkpoint-{step:08d}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumption:
    """Where a run goes on."""

    checkpoints: list[str]
    """Names of those that are whole, oldest first."""
    notes: list[str]
    """What a person should know of those that are not, and of the snapshot."""

    @property
    def step(self) -> int:
        """The last step that need not be repeated; 0 if the run begins."""
        return _step(self.checkpoints[-1]) if self.checkpoints else 0


def whole_checkpoints(directory: str) -> dict[str, int]:
    """Name → step of the checkpoints in a run's directory that are whole, oldest first."""
    return {
        name: _step(name) for name in sorted(_found(directory), key=_step) if not find_damage(f"{directory}/{name}")
    }


def find_resumption(directory: str, known_damage: Mapping[str, str]) -> Resumption:
    """Which checkpoints of a run are whole.

    An upload that was not finished, and that Ray Train therefore never registered, is no reason to stop: a run that has
    nothing else begins at step 0.

    Args:
        directory: path or URI of the run.
        known_damage: checkpoint name → what its readers found in it, where names and sizes show nothing.

    Raises:
        ValueError: if the run had finished checkpoints and none is whole; all are named with what is wrong.
    """
    registered, problem = _read_snapshot(directory)
    names = sorted(_found(directory) | registered, key=_step)
    damage = {name: known_damage.get(name) or find_damage(f"{directory}/{name}") for name in names}
    whole = [name for name in names if not damage[name]]
    # Older ones that are not registered are what Ray Train was about to delete when the run ended.
    told = [
        name for name in names if damage[name] and (name in registered or not whole or _step(name) > _step(whole[-1]))
    ]
    notes = [f"{name} cannot be used: {damage[name]}" for name in told]
    if problem:
        notes.append(f"{SNAPSHOT_FILE} {problem}: the checkpoints' own directories decide")
    if not whole and (registered or problem):
        raise ValueError(
            f"no checkpoint in {directory} is whole. {'. '.join(notes)}. Bring one back from a copy, or begin again at "
            f"step 0: delete {SNAPSHOT_FILE} and all checkpoints there"
        )
    return Resumption(checkpoints=whole, notes=notes)


def write_snapshot(directory: str, checkpoints: list[str]) -> None:
    """Have Ray Train go on from the last of these checkpoints, and count all of them as kept."""
    if not checkpoints:
        return  # nor is there an older snapshot: its checkpoints would have to be whole
    results = [_TrainingResultState(checkpoint_dir_name=name, metrics={"step": _step(name)}) for name in checkpoints]
    state = _CheckpointManagerState(
        checkpoint_results=results,
        checkpoint_report_indices=list(range(len(results))),
        latest_checkpoint_result=results[-1],
        pending_training_results=[],
        pending_validation_specs=[],
        current_report_index=len(results),
        validated_checkpoint_dir_names=[],
        timed_out_validation_checkpoint_dir_names=[],
        failed_validation_checkpoint_dir_names=[],
    )
    write_json(f"{directory}/{SNAPSHOT_FILE}", state.model_dump())


def registered_step(directory: str) -> int:
    """The step of the last checkpoint that Ray Train has registered, from which it starts workers again; 0 if none is."""
    return max(map(_step, _read_snapshot(directory)[0]), default=0)


def _found(directory: str) -> set[str]:
    """Names of the checkpoints' directories, whatever is left in them."""
    filesystem, path = resolve(directory)
    entries = filesystem.get_file_info(FileSelector(path, allow_not_found=True))
    return {
        entry.base_name for entry in entries if entry.type == FileType.Directory and _NAME.fullmatch(entry.base_name)
    }


def _step(name: str) -> int:
    return int(name.removeprefix("checkpoint-"))


def _read_snapshot(directory: str) -> tuple[set[str], str]:
    """The checkpoints that Ray Train's snapshot names, and what is wrong with the file."""
    try:
        snapshot = read_json(f"{directory}/{SNAPSHOT_FILE}")
        names = [result["checkpoint_dir_name"] for result in snapshot["checkpoint_results"]] if snapshot else []
    except (ValueError, KeyError, TypeError):
        return set(), "is damaged"
    return {name for name in names if _NAME.fullmatch(name)}, ""
