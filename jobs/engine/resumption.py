"""Chooses the checkpoint that a run continues from, its own or another run's: the newest that is whole.

The checkpoints' own directories decide. `checkpoints.json` in the run's directory only notes which checkpoints were
finished by all workers, so that one which is damaged later is told from an upload that never ended. A damaged checkpoint
costs the steps since the previous one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pyarrow.fs import FileSelector, FileType

from jobs.engine.checkpoint_files import find_damage
from jobs.engine.config import RunSection, TrainingConfig
from jobs.engine.identity import differences, may_differ, recorded_values
from pipelines.storage import read_json, resolve, write_json

RECORD_FILE = "checkpoints.json"
# Earlier versions had no record of their own; Ray Train's file names the checkpoints that it has registered.
_EARLIER_RECORD_FILE = "checkpoint_manager_snapshot.json"
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
    """Messages for the user about checkpoints that are not whole and about a damaged record."""

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

    An unfinished upload, which was never recorded, is not an error: a run that has no other checkpoint starts at step 0.

    Args:
        directory: path or URI of the run.
        known_damage: checkpoint name → damage that workers found in it by digests, which names and sizes do not show.

    Raises:
        ValueError: if the run had finished checkpoints but none is whole; the message lists what is wrong with each.
    """
    recorded, problem = _read_record(directory)
    names = sorted(_found(directory) | recorded, key=_step)
    damage = {name: known_damage.get(name) or find_damage(f"{directory}/{name}") for name in names}
    whole = [name for name in names if not damage[name]]
    # Damaged checkpoints that are older and not recorded are those that were being deleted when the run ended.
    told = [
        name for name in names if damage[name] and (name in recorded or not whole or _step(name) > _step(whole[-1]))
    ]
    notes = [f"{name} cannot be used: {damage[name]}" for name in told]
    if problem:
        notes.append(f"{RECORD_FILE} {problem}: the checkpoints' own directories decide")
    if not whole and (recorded or problem):
        raise ValueError(
            f"no checkpoint in {directory} is whole. {'. '.join(notes)}. Bring one back from a copy, or begin again at "
            f"step 0: delete {RECORD_FILE} and all checkpoints there"
        )
    return Resumption(checkpoints=whole, notes=notes)


def record_checkpoint(directory: str, name: str, *, num_kept: int, rating: float | None = None) -> None:
    """Note that all workers have written a checkpoint, and delete those that are not kept any more.

    The newest are kept, and the best one: the last that had a higher rating than all before it.

    Args:
        directory: path or URI of the run.
        name: name of the checkpoint, the newest of the run.
        num_kept: number of newest checkpoints to keep.
        rating: rating of its model; None: it was not rated.
    """
    best = _read_best(directory)
    if rating is not None and (not best or rating > best["rating"]):
        best = {"name": name, "rating": rating}
    whole = list(whole_checkpoints(directory))
    kept = {*whole[-num_kept:], *([best["name"]] if best else [])}
    # The record is written first: if this process is killed now, a checkpoint that is deleted next is not missed.
    write_record(directory, [checkpoint for checkpoint in whole if checkpoint in kept], best)
    filesystem, path = resolve(directory)
    for checkpoint in _found(directory) - kept:
        if _step(checkpoint) < _step(name):
            filesystem.delete_dir(f"{path}/{checkpoint}")


def write_record(directory: str, checkpoints: Sequence[str], best: Mapping[str, Any] | None = None) -> None:
    """Note which checkpoints are whole; a run without one is left without a record.

    Args:
        directory: path or URI of the run.
        checkpoints: names of the checkpoints, oldest first.
        best: `name` and `rating` of the best one; None: the one that was noted before.
    """
    if checkpoints:
        best = best or _read_best(directory)
        write_json(f"{directory}/{RECORD_FILE}", {"checkpoints": list(checkpoints), **({"best": best} if best else {})})


def _read_best(directory: str) -> Mapping[str, Any] | None:
    try:
        return (read_json(f"{directory}/{RECORD_FILE}") or {}).get("best")
    except ValueError:
        return None


def best_checkpoint(directory: str) -> str:
    """Return the path or URI of the whole checkpoint with the best rating, else of the newest; empty if none is whole."""
    whole = list(whole_checkpoints(directory))
    best = (_read_best(directory) or {}).get("name")
    return f"{directory}/{best if best in whole else whole[-1]}" if whole else ""


def registered_step(directory: str) -> int:
    """Return the step of the last checkpoint that all workers have written; 0 if there is none."""
    return max(map(_step, _read_record(directory)[0]), default=0)


def _found(directory: str) -> set[str]:
    """Return the names of the checkpoint directories that exist, whether or not the checkpoints are whole."""
    filesystem, path = resolve(directory)
    entries = filesystem.get_file_info(FileSelector(path, allow_not_found=True))
    return {
        entry.base_name for entry in entries if entry.type == FileType.Directory and _NAME.fullmatch(entry.base_name)
    }


def _step(name: str) -> int:
    return int(name.removeprefix("checkpoint-"))


def _read_record(directory: str) -> tuple[set[str], str]:
    """Return the checkpoints that the record names, and what is wrong with the file (empty if nothing)."""
    try:
        if (record := read_json(f"{directory}/{RECORD_FILE}")) is not None:
            names = list(record["checkpoints"])
        else:
            earlier = read_json(f"{directory}/{_EARLIER_RECORD_FILE}") or {"checkpoint_results": []}
            names = [result["checkpoint_dir_name"] for result in earlier["checkpoint_results"]]
        return {name for name in names if _NAME.fullmatch(name)}, ""
    except (ValueError, KeyError, TypeError):
        return set(), "is damaged"


def start_checkpoint(run: RunSection) -> str:
    """Return the path or URI of the checkpoint that a run starts from (`run.start_from`); empty if it starts at step 0.

    Everything else is as if the other run had been continued: weights, moments, per-sample state, the step of the
    schedules, and the place in the data.
    """
    name = run.start_from.rpartition("@")[0]
    return f"{run.resolved_storage}/{name}/{checkpoint_name(run.start_step)}" if name else ""


def check_start(config: TrainingConfig) -> None:
    """Check that a run can start from the checkpoint of another run that its configuration names, if it names one.

    Raises:
        ValueError: if there is no such checkpoint, if it is not whole, or if the other run differs in a field that shapes
            the weights or orders the data. Other decimal numbers, such as learning rates and ρ, may differ.
    """
    run = config.run
    if not run.start_from:
        return
    directory = f"{run.resolved_storage}/{run.start_from.rpartition('@')[0]}"
    held = read_json(f"{directory}/configuration.json")
    if held is None:
        raise ValueError(f"run.start_from = {run.start_from!r}: there is no run in {directory}")
    if damage := find_damage(start_checkpoint(run)):
        steps = ", ".join(map(str, whole_checkpoints(directory).values()))
        raise ValueError(
            f"run.start_from = {run.start_from!r}: {checkpoint_name(run.start_step)} in {directory} cannot be used, "
            f"{damage}; its whole checkpoints are of the steps {steps or '(none)'}"
        )
    own = recorded_values(config)
    shaping = [name for name in held.keys() | own.keys() if not may_differ(name, held.get(name), own.get(name))]
    changed = differences({name: held.get(name) for name in shaping}, {name: own.get(name) for name in shaping})
    if changed:
        raise ValueError(
            f"run.start_from = {run.start_from!r}: that run differs in what shapes the weights or orders the data: "
            f"{'; '.join(changed)}. Give it the same values; decimal numbers such as learning rates and ρ may differ"
        )
