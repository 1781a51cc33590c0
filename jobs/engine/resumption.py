"""Chooses the checkpoint that a run continues from, its own or another run's: the newest that is whole.

The checkpoints' own directories decide. `checkpoints.json` in the run's directory only notes which ones were finished by all
workers, so that one which is damaged later is told from an upload that never ended.

What a failed run says of its end is here, too: a full or lost disk, a store that refuses to be written, how the run goes on.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyarrow.fs import FileSelector, FileType

from jobs.engine import FailedError
from jobs.engine.config import RunSection, TrainingConfig
from jobs.engine.fields import differences, may_differ, recorded_values
from pipelines.storage import read_json, relative, resolve, write_json
from pipelines.store_errors import RefusedWriteError

RECORD_FILE = "checkpoints.json"
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
        name: _step(name)
        for name in sorted(found_checkpoints(directory), key=_step)
        if not find_damage(f"{directory}/{name}")
    }


def find_resumption(directory: str, known_damage: Mapping[str, str]) -> Resumption:
    """Find out which checkpoints of a run are whole.

    An unfinished upload, which was never recorded, is not an error: a run that has no other checkpoint starts at step 0.
    """
    recorded = _read_record(directory)
    names = sorted(found_checkpoints(directory) | (recorded or set()), key=_step)
    damage = {name: known_damage.get(name) or find_damage(f"{directory}/{name}") for name in names}
    whole = [name for name in names if not damage[name]]
    # Damaged checkpoints that are older and not recorded are those that were being deleted when the run ended.
    newest = _step(whole[-1]) if whole else -1
    told = [name for name in names if damage[name] and (name in (recorded or ()) or _step(name) > newest)]
    notes = [f"{name} cannot be used: {damage[name]}" for name in told]
    if recorded is None:
        notes.append(f"{RECORD_FILE} is damaged: the checkpoints' own directories decide")
    if not whole and recorded != set():
        raise ValueError(
            f"no checkpoint in {directory} is whole. {'. '.join(notes)}. Bring one back from a copy, or begin again at "
            f"step 0: delete {RECORD_FILE} and all checkpoints there"
        )
    return Resumption(checkpoints=whole, notes=notes)


def record_checkpoint(directory: str, name: str, *, num_kept: int, rating: float | None = None) -> None:
    """Note that all workers have written a checkpoint; delete all but the newest ones and the one of the highest rating."""
    best = _read_best(directory)
    if rating is not None and (not best or rating > best["rating"]):
        best = {"name": name, "rating": rating}
    whole = list(whole_checkpoints(directory))
    kept = {*whole[-num_kept:], *([best["name"]] if best else [])}
    # The record is written first: if this process is killed now, a checkpoint that is deleted next is not missed.
    write_record(directory, [checkpoint for checkpoint in whole if checkpoint in kept], best)
    filesystem, path = resolve(directory)
    for checkpoint in found_checkpoints(directory) - kept:
        if _step(checkpoint) < _step(name):
            filesystem.delete_dir(f"{path}/{checkpoint}")


def write_record(directory: str, checkpoints: Sequence[str], best: Mapping[str, Any] | None = None) -> None:
    """Note which checkpoints are whole; a run without one is left without a record."""
    if checkpoints:
        best = best or _read_best(directory)
        write_json(f"{directory}/{RECORD_FILE}", {"checkpoints": list(checkpoints), **({"best": best} if best else {})})


def _read_best(directory: str) -> Mapping[str, Any] | None:
    with suppress(ValueError):
        return (read_json(f"{directory}/{RECORD_FILE}") or {}).get("best")
    return None


def best_checkpoint(directory: str) -> str:
    """Return the path or URI of the whole checkpoint with the best rating, else of the newest; empty if none is whole."""
    whole = list(whole_checkpoints(directory))
    best = (_read_best(directory) or {}).get("name")
    return f"{directory}/{best if best in whole else whole[-1]}" if whole else ""


def registered_step(directory: str) -> int:
    """Return the step of the last checkpoint that all workers have written; 0 if there is none."""
    return max(map(_step, _read_record(directory) or ()), default=0)


def found_checkpoints(directory: str) -> set[str]:
    """Return the names of the checkpoint directories that exist, whether or not the checkpoints are whole."""
    filesystem, path = resolve(directory)
    entries = filesystem.get_file_info(FileSelector(path, allow_not_found=True))
    names = {entry.base_name for entry in entries if entry.type == FileType.Directory}
    return {name for name in names if _NAME.fullmatch(name)}


def _step(name: str) -> int:
    return int(name.removeprefix("checkpoint-"))


def _read_record(directory: str) -> set[str] | None:
    """Return the checkpoints that the record names, if there is one; None if it is damaged."""
    with suppress(ValueError, KeyError, TypeError):
        record = read_json(f"{directory}/{RECORD_FILE}")
        names = [] if record is None else record["checkpoints"]
        return {name for name in names if _NAME.fullmatch(name)}
    return None


def start_checkpoint(run: RunSection) -> str:
    """Return the path or URI of the checkpoint that a run starts from (`run.start_from`); empty if it starts at step 0."""
    name = run.start_from.rpartition("@")[0]
    return f"{run.resolved_storage}/{name}/{checkpoint_name(run.start_step)}" if name else ""


def check_start(config: TrainingConfig) -> None:
    """Check that a run can start from the checkpoint of another run that its configuration names, if it names one."""
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


# ---- damage ----------------------------------------------------------------------------------------------------------
#
# Every worker adds to a checkpoint a list of the files of its part. The checkpoint is whole if the lists of all workers of
# one group exist, and every listed file as listed. The driver compares names and sizes, the workers compare digests.

_NUM_READERS = 16


def list_name(rank: int) -> str:
    """Return the name of the file list that the worker of this rank writes."""
    return f"files-{rank:05d}.json"


def write_file_list(directory: Path, *, rank: int, world_size: int, group: str) -> None:
    """Write a list of all files below a directory into that directory."""
    files = {
        str(file.relative_to(directory)): {"num_bytes": file.stat().st_size, "digest": _digest(file)}
        for file in sorted(directory.rglob("*"))
        if file.is_file() and file != directory / list_name(rank)  # the list exists if an upload is retried
    }
    content = {"world_size": world_size, "group": group, "files": files}
    (directory / list_name(rank)).write_text(json.dumps(content, indent=1))


def count_writers(uri: str) -> int:
    """Return how many workers wrote the whole checkpoint at a path or URI, which may hold parts of a larger group, too."""
    listed = read_json(f"{uri}/{list_name(0)}")
    if listed is None:
        raise FileNotFoundError(f"{uri} holds no {list_name(0)}, the list of files of a checkpoint's first worker")
    return int(listed["world_size"])


def find_damage(uri: str) -> str:
    """Describe why the checkpoint at a path or URI is not whole, judged by file names and sizes; empty if it is whole."""
    filesystem, path = resolve(uri)
    entries = filesystem.get_file_info(FileSelector(path, recursive=True, allow_not_found=True))
    sizes = {relative(entry.path, path): entry.size for entry in entries if entry.type == FileType.File}
    if not sizes:
        return "the directory is missing or empty"

    def read(rank: int) -> dict[str, Any]:
        if (name := list_name(rank)) not in sizes:
            raise ValueError(f"{name} is missing: its upload was not finished")
        try:
            return read_json(f"{uri}/{name}") or {}
        except ValueError as error:
            raise ValueError(f"{name} is damaged") from error

    try:
        first = read(0)
        with ThreadPoolExecutor(_NUM_READERS) as pool:
            others = list(pool.map(read, range(1, first["world_size"])))
        for rank, listed in enumerate([first, *others]):
            if listed["group"] != first["group"]:
                return f"{list_name(rank)} is of another attempt to save this step than {list_name(0)}"
            for name, file in listed["files"].items():
                if name not in sizes:
                    return f"{name} is missing"
                if sizes[name] != file["num_bytes"]:
                    return f"{name} has {sizes[name]} bytes instead of {file['num_bytes']}"
    except ValueError as error:
        return str(error)
    except (AttributeError, KeyError, TypeError):
        return "a list of its files is damaged"
    return ""


def find_changed_file(directory: Path, *, rank: int, world_size: int) -> str:
    """Describe the first file of this worker's share whose digest differs from its list; empty if none does.

    Worker r checks the parts of the writers r, r + world size and so on.
    """
    try:
        num_writers = json.loads((directory / list_name(0)).read_bytes())["world_size"]
        for writer in range(rank, num_writers, world_size):
            for name, file in json.loads((directory / list_name(writer)).read_bytes())["files"].items():
                if _digest(directory / name) != file["digest"]:
                    return f"{name} does not hold what was written"
    except FileNotFoundError as error:
        return f"{Path(error.filename).relative_to(directory)} is missing"
    except (AttributeError, ValueError, KeyError, TypeError):
        return "a list of its files is damaged"
    return ""


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


# ---- failures --------------------------------------------------------------------------------------------------------

# What stays so however often it is tried: no room is left, or the storage has become read-only or unreachable.
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_NO_STORAGE = {errno.EROFS, errno.ESTALE, errno.ENOTCONN, errno.EHOSTDOWN}
_FROM_THE_LAST = "the same command then goes on from the last checkpoint"
# What says so only of a file that is written.
_GONE = {errno.ENOTDIR, errno.ENODEV}


class FatalTrainingError(FailedError):
    """The run has failed, and restarting its workers would not help; the message says how to continue it, if it can be."""

    def __init__(self, message: str, cause: str = "") -> None:
        super().__init__(message)
        self.cause = cause or message


class CrashedTrainingError(FatalTrainingError):
    """The only worker of a run has ended by an exception, whose cause may be gone when the run is started again."""


class DiskFullError(OSError):
    """A file cannot be written: the disk is full, a quota is reached, or the storage is read-only or away."""


@contextmanager
def naming_full_disk(path: Path | str) -> Iterator[None]:
    """Convert every error of a full disk, or of a storage that cannot be written, into one that names the path."""
    try:
        yield
    except DiskFullError:
        raise
    except Exception as error:
        if number := _no_room_number(error) or (isinstance(error, OSError) and error.errno in _GONE and error.errno):
            raise DiskFullError(number, os.strerror(number), str(path)) from error
        raise


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and those that it comes from; torch raises another error while it handles the original one."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _no_room_number(failure: BaseException) -> int:
    """Return the operating system's error number if an error was caused by a full or lost disk, else 0."""
    for error in _causes(failure):
        if isinstance(error, DiskFullError) or (isinstance(error, OSError) and error.errno in _NO_ROOM | _NO_STORAGE):
            return error.errno or 0
        for number in _NO_ROOM | _NO_STORAGE:
            if f"(os error {number})" in str(error):  # format of safetensors, which is written in Rust
                return number
    return 0


def explain_storage(failures: Iterable[BaseException], directory: str) -> str:
    """Say which file or URI cannot be written and how to continue; empty if that is not why a run failed."""
    for failure in failures:
        if number := _no_room_number(failure):
            reason = f"{os.strerror(number)}: {getattr(failure, 'filename', None) or directory}"
            remedy = "make room there" if number in _NO_ROOM else "see that it can be written again"
        elif refused := [cause for cause in _causes(failure) if isinstance(cause, RefusedWriteError)]:
            reason, remedy = str(refused[0]), "grant write access"
        else:
            continue
        is_there = not number or number in _NO_ROOM | {errno.EROFS}
        return f"{reason}. To continue, {remedy}: {describe_continuation(directory) if is_there else _FROM_THE_LAST}"
    return ""


def describe_continuation(directory: str) -> str:
    """Say from where the run in a directory goes on if its command is typed again."""
    with suppress(OSError, ValueError):  # the store may be lost, or no checkpoint be whole: the next start says so
        if not (step := find_resumption(directory, {}).step):
            return "the same command then begins again at step 0"
        return f"the same command then goes on from the checkpoint of step {step}, which is whole"
    return _FROM_THE_LAST
