"""Text archives: which files are archives, and in which format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from pyarrow import fs

from pipelines.storage import relative, resolve

NUM_NAMES_SHOWN = 5


class ArchiveFormat(StrEnum):
    """How the bytes of an archive, or of a member of a tar, are to be read."""

    JSONL = "jsonl"
    JSONL_GZ = "jsonl.gz"
    JSONL_ZST = "jsonl.zst"
    TAR = "tar"
    PARQUET = "parquet"
    PLAIN = "plain"
    """The file is one document."""


SUFFIXES = {
    ".jsonl": ArchiveFormat.JSONL,
    ".jsonl.gz": ArchiveFormat.JSONL_GZ,
    ".jsonl.zst": ArchiveFormat.JSONL_ZST,
    ".tar": ArchiveFormat.TAR,
    ".parquet": ArchiveFormat.PARQUET,
}
"""File suffix -> format. `.jsonl.zst.tar`, the name OpenWebText2 is published under, is a `.tar`."""

PLAIN_SUFFIXES = dict.fromkeys((".txt", ".md", ".rst"), ArchiveFormat.PLAIN)
"""Files that hold one document each. Nothing lists them unasked: beside archives lies many a README."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Archive:
    """One file of documents."""

    path: str
    """Path within the filesystem of the URI it was listed from."""
    format: ArchiveFormat
    num_bytes: int
    """Size of the file as stored."""


def list_archives(uri: str, suffixes: Mapping[str, ArchiveFormat] = SUFFIXES) -> list[Archive]:
    """The archives at a URI, by path: the file itself, or all below a directory that end in one of the suffixes.

    Below a directory, files with another suffix are passed over, and so is everything whose name, or whose directory's
    name, begins with `.` or `_` (unfinished downloads, markers such as `_SUCCESS`).

    Raises FileNotFoundError if the path does not exist or is a directory without archives, and ValueError if it is a
    file with an unknown suffix.
    """
    filesystem, root = resolve(uri)
    info = filesystem.get_file_info(root)
    legal = ", ".join(suffixes)
    if info.type == fs.FileType.NotFound:
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
        raise FileNotFoundError(f"uri {uri!r}: no file ends in one of {legal}; {seen(others, len(others))}")
    return sorted(archives, key=lambda archive: archive.path)


def format_of(name: str, suffixes: Mapping[str, ArchiveFormat]) -> ArchiveFormat | None:
    """The format that the name's suffix stands for, or None."""
    return next((archive_format for suffix, archive_format in suffixes.items() if name.endswith(suffix)), None)


def seen(names: list[str], num_names: int) -> str:
    """A few of so many names, for a message."""
    if not names:
        return "there is no other file either"
    more = f" and {num_names - NUM_NAMES_SHOWN} more" if num_names > NUM_NAMES_SHOWN else ""
    return f"seen: {', '.join(sorted(names)[:NUM_NAMES_SHOWN])}{more}"
