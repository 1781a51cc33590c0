"""Lists of a checkpoint's files with their sizes and digests, so that damage is detected before the checkpoint is used.

Every worker that writes a part of a checkpoint adds a list of the files of its part, with their sizes and digests. A
checkpoint is whole if the lists of all its workers exist and belong to one group of workers, and every listed file
exists as listed. An upload that never finished is therefore not whole: a list or a file is missing or too short.

The driver compares sizes before it starts any workers (:func:`find_damage`), which costs a directory listing. Each
worker compares the digests of the part that it is about to read anyway (:func:`find_changed_file`).

This module does not import torch: the driver imports it before it knows whether there is a run to continue.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pyarrow.fs import FileSelector, FileType

from pipelines.storage import read_json, relative, resolve

_NUM_READERS = 16


def list_name(rank: int) -> str:
    """Return the name of the file list that the worker of this rank writes."""
    return f"files-{rank:05d}.json"


def write_file_list(directory: Path, *, rank: int, world_size: int, group: str) -> None:
    """Write a list of all files below a directory into that directory.

    Args:
        directory: holds this worker's part of the checkpoint.
        group: identifies the workers that write the checkpoint together, so that parts written before and after a
            restart are not mistaken for one checkpoint.
    """
    files = {
        str(file.relative_to(directory)): {"num_bytes": file.stat().st_size, "digest": _digest(file)}
        for file in sorted(directory.rglob("*"))
        if file.is_file() and file != directory / list_name(rank)  # the list exists if an upload is retried
    }
    content = {"world_size": world_size, "group": group, "files": files}
    (directory / list_name(rank)).write_text(json.dumps(content, indent=1))


def count_writers(uri: str) -> int:
    """Return how many workers wrote the whole checkpoint at a path or URI.

    Its directory may hold more parts: those that a group of another size had written when it was killed at the same step.

    Raises:
        FileNotFoundError: if the first worker's list of files is missing.
    """
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
    """Describe the first file of this worker's share whose digest differs from its list; empty if none does.

    Together the workers check everything: worker r checks the parts of the writers r, r + world size and so on. If as
    many workers read as wrote, each thus checks the part that it is about to load.
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
    """A list of files is missing or is not valid JSON."""


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
