"""List text archives and determine their formats."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum

from pyarrow import fs

from pipelines.object_store import is_local
from pipelines.storage import relative, resolve
from pipelines.store_errors import names_store

NUM_NAMES_SHOWN = 5


class ArchiveFormat(StrEnum):
    """Format of the bytes of an archive, or of a member of a tar."""

    JSONL = "jsonl"
    JSONL_GZ = "jsonl.gz"
    JSONL_ZST = "jsonl.zst"
    TAR = "tar"
    PARQUET = "parquet"
    PLAIN = "plain"
    """The whole file is one document of plain text."""


SUFFIXES = {
    ".jsonl": ArchiveFormat.JSONL,
    ".jsonl.gz": ArchiveFormat.JSONL_GZ,
    ".jsonl.zst": ArchiveFormat.JSONL_ZST,
    ".tar": ArchiveFormat.TAR,
    ".parquet": ArchiveFormat.PARQUET,
}
"""Mapping from file suffix to format. `.jsonl.zst.tar`, the suffix of the published OpenWebText2, counts as `.tar`."""

PLAIN_SUFFIXES = dict.fromkeys((".txt", ".md", ".rst"), ArchiveFormat.PLAIN)
"""Suffixes of plain-text files, which hold one document each.

`list_archives` does not list them by default, because directories of archives often contain a README too.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Archive:
    """One file that contains documents."""

    path: str
    """Path of the file within the filesystem of the URI that it was listed from."""
    format: ArchiveFormat
    """Format of the file."""
    num_bytes: int
    """Size of the stored (possibly compressed) file in bytes."""


@names_store
def list_archives(uri: str, suffixes: Mapping[str, ArchiveFormat] = SUFFIXES) -> list[Archive]:
    """List the archives at a URI, sorted by path.

    If the URI is a file, the result is that file. If it is a directory, the result is every file at any depth below it
    that ends in one of `suffixes`, in small or capital letters. Files with other suffixes are skipped, and so is everything
    whose name, or whose directory's name, begins with `.` or `_` (unfinished downloads, markers such as `_SUCCESS`). A local
    file that is found in several ways, through links to it or to a directory, is listed once, under the first of its names.

    Raises:
        FileNotFoundError: if the path does not exist or is a directory without archives.
        OSError: if an object store refuses or does not answer; the message says what to set.
        ValueError: if the path is a file with an unknown suffix.
    """
    filesystem, root = resolve(uri)
    info = filesystem.get_file_info(root)
    legal = ", ".join(suffixes)
    if info.type == fs.FileType.NotFound:
        if not is_local(filesystem):
            with suppress(FileNotFoundError):  # Another error says that there is no such bucket.
                filesystem.get_file_info(fs.FileSelector(root))
        raise FileNotFoundError(f"uri {uri!r}: no such file or directory")
    if info.type != fs.FileType.Directory:
        archive_format = format_of(root, suffixes)
        if archive_format is None:
            raise ValueError(f"uri {uri!r}: unknown suffix of file {info.base_name!r}; expected one of {legal}")
        return [Archive(path=root, format=archive_format, num_bytes=info.size)]

    archives, others = [], []
    for file in filesystem.get_file_info(fs.FileSelector(root, recursive=True)):
        name = relative(file.path, root)
        if file.type == fs.FileType.Directory or any(part.startswith((".", "_")) for part in name.split("/")):
            continue
        archive_format = format_of(name, suffixes)
        if archive_format is None:
            others.append(name)
        else:
            archives.append(Archive(path=file.path, format=archive_format, num_bytes=file.size))
    if not archives:
        raise FileNotFoundError(f"uri {uri!r}: no file ends in one of {legal}; {describe_names(others, len(others))}")
    archives.sort(
        key=lambda archive: (archive.path.count("/"), archive.path)
    )  # a link to a directory makes paths longer
    if is_local(filesystem):
        archives = list({os.path.realpath(archive.path): archive for archive in reversed(archives)}.values())
    return sorted(archives, key=lambda archive: archive.path)


def format_of(name: str, suffixes: Mapping[str, ArchiveFormat]) -> ArchiveFormat | None:
    """Return the format that the name's suffix stands for, or None if no suffix matches."""
    return next((archive_format for suffix, archive_format in suffixes.items() if name.lower().endswith(suffix)), None)


def describe_names(names: list[str], num_names: int) -> str:
    """Format a few names for an error message.

    Args:
        names: names to show; at most NUM_NAMES_SHOWN of them appear.
        num_names: total number of names, which may exceed `len(names)`.
    """
    if not names:
        return "there is no other file either"
    more = f" and {num_names - NUM_NAMES_SHOWN} more" if num_names > NUM_NAMES_SHOWN else ""
    return f"seen: {', '.join(sorted(names)[:NUM_NAMES_SHOWN])}{more}"
