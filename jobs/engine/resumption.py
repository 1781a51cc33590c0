"""Chooses the checkpoint that a run continues from: the newest that is whole.

Ray Train continues from the newest checkpoint named in its snapshot file, even if that checkpoint is damaged or gone.
Here the checkpoints' own directories decide instead, and the snapshot is rewritten from them before every start. A
snapshot that is damaged, missing or written by another version of Ray therefore does no harm, and a damaged checkpoint
costs only the steps since the previous one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from pyarrow.fs import FileSelector, FileType
from ray.train.v2._internal.constants import CHECKPOINT_MANAGER_SNAPSHOT_FILENAME as SNAPSHOT_FILE
from ray.train.v2._internal.execution.checkpoint.checkpoint_manager import (
    _CheckpointManagerState,
    _TrainingResultState,
)

from jobs.engine.checkpoint_files import find_damage
from pipelines.storage import read_json, resolve, write_json

_NAME = re.compile(r"checkpoint-(\d+)")


def checkpoint_name(step: int) -> str:
    """Return the directory name of the checkpoint of a step."""
    return f"checkpoint-{step:08d}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumption:
    """The checkpoints that a run can continue from."""

    checkpoints: list[str]
    """Names of the checkpoints that are whole, oldest first."""
    notes: list[str]
    """Messages for the user about checkpoints that are not whole and about a damaged snapshot."""

    @property
    def step(self) -> int:
        """Step of the newest whole checkpoint, after which the run continues; 0 if it starts from the beginning."""
        return _step(self.checkpoints[-1]) if self.checkpoints else 0


def whole_checkpoints(directory: str) -> dict[str, int]:
    """Return name → step of the checkpoints in a run's directory that are whole, oldest first."""
    return {
        name: _step(name) for name in sorted(_found(directory), key=_step) if not find_damage(f"{directory}/{name}")
    }


def find_resumption(directory: str, known_damage: Mapping[str, str]) -> Resumption:
    """Find out which checkpoints of a run are whole.

    An unfinished upload, which Ray Train never registered, is not an error: a run that has no other checkpoint starts
    at step 0.

    Args:
        directory: path or URI of the run.
        known_damage: checkpoint name → damage that workers found in it by digests, which names and sizes do not show.

    Raises:
        ValueError: if the run had finished checkpoints but none is whole; the message lists what is wrong with each.
    """
    registered, problem = _read_snapshot(directory)
    names = sorted(_found(directory) | registered, key=_step)
    damage = {name: known_damage.get(name) or find_damage(f"{directory}/{name}") for name in names}
    whole = [name for name in names if not damage[name]]
    # Damaged checkpoints that are older and not registered are those that Ray Train was deleting when the run ended.
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
    """Write Ray Train's snapshot so that it continues from the last of these checkpoints and counts all of them as kept."""
    if not checkpoints:
        return  # then there is no older snapshot either, since find_resumption would have raised an error
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
    """Return the step of the last checkpoint that Ray Train has registered, from which it restarts workers; else 0."""
    return max(map(_step, _read_snapshot(directory)[0]), default=0)


def _found(directory: str) -> set[str]:
    """Return the names of the checkpoint directories that exist, whether or not the checkpoints are whole."""
    filesystem, path = resolve(directory)
    entries = filesystem.get_file_info(FileSelector(path, allow_not_found=True))
    return {
        entry.base_name for entry in entries if entry.type == FileType.Directory and _NAME.fullmatch(entry.base_name)
    }


def _step(name: str) -> int:
    return int(name.removeprefix("checkpoint-"))


def _read_snapshot(directory: str) -> tuple[set[str], str]:
    """Return the checkpoints that Ray Train's snapshot names, and what is wrong with the file (empty if nothing)."""
    try:
        snapshot = read_json(f"{directory}/{SNAPSHOT_FILE}")
        names = [result["checkpoint_dir_name"] for result in snapshot["checkpoint_results"]] if snapshot else []
    except (ValueError, KeyError, TypeError):
        return set(), "is damaged"
    return {name for name in names if _NAME.fullmatch(name)}, ""
