"""The files of a checkpoint: which there should be, of what size and what content, so that damage is seen before use.

Every worker that writes a part of a checkpoint adds a list of the files of its part, with their sizes and digests. A
checkpoint is whole if the lists of all its workers are there, belong to one group of workers, and their files are there
as listed. An upload that was never finished therefore is not whole: a list or a file is missing, or is too short.

The driver compares sizes before it starts any workers (:func:`find_damage`), which costs a directory listing. The workers
compare digests (:func:`find_changed_file`), each of the part that it is about to read anyway.

Imports no torch: the driver reads this before it knows whether there is anything to continue.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pipelines.storage import read_json, relative, resolve
from pyarrow.fs import FileSelector, FileType

_NUM_READERS = 16


def list_name(rank: int) -> str:
    """Name of the file list of the worker of this rank."""
    return f"files-{rank:05d}.json"


def write_file_list(directory: Path, *, rank: int, world_size: int, group: str) -> None:
    """List all files below a directory, in it.

    Args:
        directory: what this worker adds to the checkpoint.
        group: identifies the group of workers that writes the checkpoint together. Parts that were written before and after
            a restart must not be taken for one checkpoint.
    """
    files = {
        str(file.relative_to(directory)): {"num_bytes": file.stat().st_size, "digest": _digest(file)}
        for file in sorted(directory.rglob("*"))
        if file.is_file() and file != directory / list_name(rank)  # there if an upload is tried again
    }
    content = {"world_size": world_size, "group": group, "files": files}
    (directory / list_name(rank)).write_text(json.dumps(content, indent=1))


def find_damage(uri: str) -> str:
    """What keeps the checkpoint at a path or URI from being whole, by names and sizes; empty if nothing does."""
    filesystem, path = resolve(uri)
    entries = filesystem.get_file_info(FileSelector(path, recursive=True, allow_not_found=True))
    sizes = {relative(entry.path, path): entry.size for entry in entries if entry.type == FileType.File}
    if not sizes:
        return "the directory is missing or empty"
    try:
        first = _read_list(uri, 0, sizes)
        with ThreadPoolExecutor(_NUM_READERS) as pool:
            others = list(pool.map(lambda rank: _read_list(uri, rank, sizes), range(1, first["world_size"])))
        for rank, listed in enumerate([first, *others]):
            if listed["group"] != first["group"]:
                return f"{list_name(rank)} is of another attempt to save this step than {list_name(0)}"
            for name, file in listed["files"].items():
                if name not in sizes:
                    return f"{name} is missing"
                if sizes[name] != file["num_bytes"]:
                    return f"{name} has {sizes[name]} bytes instead of {file['num_bytes']}"
    except _UnreadableListError as error:
        return str(error)
    except (AttributeError, KeyError, TypeError):
        return "a list of its files is damaged"
    return ""


def find_changed_file(directory: Path, *, rank: int, world_size: int) -> str:
    """What differs from the lists in the files that this worker reads, by digest; empty if nothing does.

    Together all workers read everything: worker r the parts of the writers r, r + world size and so on. Where as many
    workers read as wrote, each thus reads the part that it is about to load.
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


class _UnreadableListError(Exception):
    """A list of files is missing or no JSON object."""


def _read_list(uri: str, rank: int, sizes: Mapping[str, int]) -> dict[str, Any]:
    name = list_name(rank)
    if name not in sizes:
        raise _UnreadableListError(f"{name} is missing: its upload was not finished")
    try:
        return read_json(f"{uri}/{name}") or {}
    except ValueError as error:
        raise _UnreadableListError(f"{name} is damaged") from error


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
