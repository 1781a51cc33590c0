"""List the archives of a source (a file, a directory or a pattern), and determine their formats by their names."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain
from stat import S_ISREG
from typing import NamedTuple

from braceexpand import braceexpand
from pyarrow import fs

from pipelines.object_store import is_local
from pipelines.problems import printable
from pipelines.storage import exists, is_utf8, join, relative, resolve, split_query
from pipelines.store_errors import names_store

NUM_NAMES_SHOWN = 5


class ArchiveFormat(StrEnum):
    """Format of the bytes of an archive, or of a member of a tar."""

    JSONL = "jsonl"
    JSONL_GZ = "jsonl.gz"
    JSONL_ZST = "jsonl.zst"
    JSONL_XZ = "jsonl.xz"
    JSONL_BZ2 = "jsonl.bz2"
    TAR = "tar"
    """A tar, which may be compressed as a whole."""
    PARQUET = "parquet"
    PLAIN = "plain"
    """The whole file is one document of plain text."""


SUFFIXES = {
    ".jsonl": ArchiveFormat.JSONL,
    ".jsonl.gz": ArchiveFormat.JSONL_GZ,
    ".json.gz": ArchiveFormat.JSONL_GZ,  # As C4 spells it.
    ".jsonl.zst": ArchiveFormat.JSONL_ZST,
    ".jsonl.xz": ArchiveFormat.JSONL_XZ,
    ".jsonl.bz2": ArchiveFormat.JSONL_BZ2,
    ".tar": ArchiveFormat.TAR,
    ".tar.gz": ArchiveFormat.TAR,
    ".tgz": ArchiveFormat.TAR,
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
    format: ArchiveFormat
    num_bytes: int
    """Size of the stored (possibly compressed) file in bytes."""
    modified_ns: int = 0
    """Time of modification, by which a file that is written again in the same size is told from the one before."""


class Listing(NamedTuple):
    """What lies at a URI, and the names, fit to be shown, of the files that are not read; hidden ones are not among them."""

    archives: list[Archive]
    not_read: list[str]


def list_archives(uri: str, suffixes: Mapping[str, ArchiveFormat] = SUFFIXES) -> list[Archive]:
    """Return the archives of :func:`list_source`."""
    return list_source(uri, suffixes).archives


@names_store
def list_source(uri: str, suffixes: Mapping[str, ArchiveFormat] = SUFFIXES) -> Listing:
    """List the archives at a URI: that file, or the files of known suffixes (in any case) at any depth below a directory.

    Not read are files of other suffixes, broken links, and names that are not UTF-8; passed over is what is hidden: its name,
    or its directory's, begins with `.` or `_`. A local file that several links lead to is listed once. A path that does not
    exist may be a pattern: webdataset's braces (`{0000..0003}`, `{a,b}`), and `*` within a name.

    Raises:
        FileNotFoundError: if the path does not exist or is a directory without archives.
        OSError: if an object store refuses or does not answer; the message says what to set.
        ValueError: if the path is a file with an unknown suffix, or its braces are not balanced.
    """
    places = _expand(uri)
    if places != [uri]:
        listings = [list_source(place, suffixes) for place in places]
        archives = {archive.path: archive for listing in listings for archive in listing.archives}
        not_read = list(dict.fromkeys(chain.from_iterable(listing.not_read for listing in listings)))
        return Listing([archives[path] for path in sorted(archives)], not_read)
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
        archive = Archive(path=root, format=archive_format, num_bytes=info.size, modified_ns=info.mtime_ns or 0)
        return Listing([archive], [])

    archives, not_read = {}, []
    if is_local(filesystem):
        files = _walk_local(root)
    else:
        found = filesystem.get_file_info(fs.FileSelector(root, recursive=True))
        files = ((file.path, file.size, file.mtime_ns or 0) for file in found if file.type != fs.FileType.Directory)
    for path, num_bytes, modified_ns in files:
        name = relative(path, root)
        archive_format = format_of(name, suffixes)
        if any(part.startswith((".", "_")) for part in name.split("/")):
            continue
        if archive_format is None or num_bytes is None or not is_utf8(path):
            not_read.append(printable(name))
        else:
            archives[path] = Archive(path=path, format=archive_format, num_bytes=num_bytes, modified_ns=modified_ns)
    not_read.sort()
    if not archives:
        raise FileNotFoundError(
            f"uri {uri!r}: no file ends in one of {legal}; {describe_names(not_read, len(not_read))}"
        )
    return Listing([archives[path] for path in sorted(archives)], not_read)


def _walk_local(root: str) -> Iterator[tuple[str, int | None, int]]:
    """Yield path, size and time of modification of every file; the size is None for what is no regular file.

    Links are followed, and what was visited is not visited again: a directory with two links to itself would have 2^40 paths.
    """

    def refuse(error: OSError) -> None:
        raise error

    seen = set[str]()
    for directory, directories, names in os.walk(root, onerror=refuse, followlinks=True):
        real = os.path.realpath(directory)
        if real in seen:
            directories.clear()
            continue
        seen.add(real)
        directories[:] = sorted(name for name in directories if not name.startswith((".", "_")))
        for name in sorted(names):
            path = os.path.join(directory, name)
            target = os.path.realpath(path) if os.path.islink(path) else os.path.join(real, name)
            if target in seen or name.startswith((".", "_")):
                continue
            seen.add(target)
            try:
                status = os.stat(path)
            except OSError:  # A link leads to nothing, or to itself.
                yield path, None, 0
            else:
                yield path, status.st_size if S_ISREG(status.st_mode) else None, status.st_mtime_ns


def resolve_source(uri: str) -> tuple[fs.FileSystem, str]:
    """Return the filesystem of a source and the path that the names of its archives are relative to.

    This is what `resolve` returns, or, for a pattern, the directory before the first name that is one.
    """
    return resolve(_fixed_part(uri) if _is_pattern(uri) else uri)


def _is_pattern(uri: str) -> bool:
    """Return whether a path or URI is a pattern: a local path that exists is none, whatever its characters are."""
    return bool({"{", "*"} & set(uri)) and ("://" in uri or not exists(uri))


def _fixed_part(pattern: str) -> str:
    """Return the directory before the first name of a pattern that holds one of its special characters."""
    place, query = split_query(pattern)
    directory, slash, _ = re.split(r"[{*]", place, maxsplit=1)[0].rpartition("/")
    return (directory or slash or ".") + query


def _expand(uri: str) -> list[str]:
    """Return the paths or URIs that a pattern stands for; what is no pattern stands for itself."""
    if not _is_pattern(uri):
        return [uri]
    try:
        patterns = list(braceexpand(uri, escape=False))
    except ValueError as error:
        raise ValueError(f"uri {uri!r}: no such file, and as a pattern its braces are not balanced") from error
    found = list(chain.from_iterable(_match(pattern) if "*" in pattern else [pattern] for pattern in patterns))
    if not found:
        raise FileNotFoundError(f"uri {uri!r}: no file or directory has a name of this pattern")
    return found


def _match(pattern: str) -> list[str]:
    """Return the paths or URIs whose names match a pattern with `*`, sorted; as in a shell, it begins with no dot."""
    base = _fixed_part(pattern)
    matches = [base]
    for wanted in split_query(pattern)[0].removeprefix(split_query(base)[0]).lstrip("/").split("/"):
        is_match = re.compile(".*".join(map(re.escape, wanted.split("*"))), re.DOTALL).fullmatch
        places, matches = matches, []
        for place in places:
            names = sorted(name for name in _list_names(place) if is_match(name))
            matches += [join(place, name) for name in names if name.startswith(".") == wanted.startswith(".")]
    return matches


def _list_names(directory: str) -> list[str]:
    filesystem, path = resolve(directory)
    if filesystem.get_file_info(path).type != fs.FileType.Directory:
        return []
    if is_local(filesystem):
        return os.listdir(path)
    return [file.base_name for file in filesystem.get_file_info(fs.FileSelector(path))]


def format_of(name: str, suffixes: Mapping[str, ArchiveFormat]) -> ArchiveFormat | None:
    """Return the format that the name's suffix stands for, or None if no suffix matches."""
    return next((archive_format for suffix, archive_format in suffixes.items() if name.lower().endswith(suffix)), None)


def describe_names(names: list[str], num_names: int) -> str:
    """Format a few of `num_names` names for an error message; at most NUM_NAMES_SHOWN of them appear."""
    return f"seen: {_few(sorted(names), num_names)}" if names else "there is no other file either"


def describe_not_read(names: list[str]) -> str:
    """Return the part of a summary that names the files of a source that were not read; empty if there are none."""
    return f"; not read: {len(names)} other files ({_few(names, len(names))})" if names else ""


def _few(names: list[str], num_names: int) -> str:
    more = f" and {num_names - NUM_NAMES_SHOWN} more" if num_names > NUM_NAMES_SHOWN else ""
    return ", ".join(names[:NUM_NAMES_SHOWN]) + more
