"""Images in a folder a class: in a tar, in several tars, or in a directory. The class is the last folder of the path.

`train/airplane/0001.jpg` and `test/airplane/0001.jpg` are of the class `airplane`. Nothing is extracted: what is kept is
where the bytes of every image are.
"""

from __future__ import annotations

import hashlib
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import NamedTuple

import numpy as np
from pipelines.archives import ArchiveFormat, list_archives
from pipelines.images.samples import IMAGE_SUFFIXES, MAX_IMAGE_BYTES
from pipelines.ranges import ByteRange, range_reader
from pipelines.storage import relative, resolve
from pipelines.tars import tar_members
from pyarrow import fs

from jobs.engine.config import absolute_path

_SUFFIXES = tuple(f".{suffix}" for suffix in IMAGE_SUFFIXES)


class _Entry(NamedTuple):
    """A member of an archive, or a file or folder."""

    name: str
    """Its path from the root."""
    is_folder: bool
    archive: int
    offset: int
    num_bytes: int
    stamp: float
    """When it was changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassFolders:
    """The images of a data set, numbered from 0, with their classes."""

    source: str
    files: tuple[str, ...]
    """Of every image, or the archives that hold them: paths within the filesystem of `source`."""
    names: tuple[str, ...]
    """(n,) of the images, for messages."""
    places: np.ndarray
    """(n, 3) int64: number of the file, offset of the image in it, its size in bytes."""
    folders: tuple[str, ...]
    """The folders that are classes, in order."""
    labels: np.ndarray
    """(n,) int64, the number of each image's folder."""
    num_left_out: int
    """Files that are no images by their names."""
    digest: str
    """Changes whenever an image is added, removed, renamed or changed."""

    @classmethod
    def read(cls, source: str) -> ClassFolders:
        """List what is at a path or URI.

        Raises:
            FileNotFoundError: if there is nothing.
            ValueError: for an archive that is cut, an image outside any folder, a folder without images, no image at all.
        """
        files, entries = _archives(source) if _is_archive(source) else _directory(source)
        images = sorted(entry for entry in entries if not entry.is_folder and entry.name.lower().endswith(_SUFFIXES))
        if not images:
            raise ValueError(f"{source} holds no image in a folder ({', '.join(_SUFFIXES)})")
        classes = [PurePosixPath(entry.name).parent.name for entry in images]
        if "" in classes:
            raise ValueError(f"{source}: the image {images[classes.index('')].name!r} lies in no folder of a class")
        _check_folders(source, entries, images)
        folders = sorted(set(classes))
        numbers = {folder: number for number, folder in enumerate(folders)}
        return cls(
            source=absolute_path(source),
            files=files,
            names=tuple(entry.name for entry in images),
            places=np.array([(entry.archive, entry.offset, entry.num_bytes) for entry in images], dtype=np.int64),
            folders=tuple(folders),
            labels=np.array([numbers[folder] for folder in classes], dtype=np.int64),
            num_left_out=sum(not entry.is_folder for entry in entries) - len(images),
            digest=hashlib.blake2b(repr(images).encode(), digest_size=12).hexdigest(),
        )

    @property
    def num_images(self) -> int:
        """n."""
        return len(self.names)

    def read_bytes(self, numbers: Sequence[int]) -> Iterator[bytes]:
        """The files of the images, as they are; of one that is too long, a byte more than it may have."""
        places = self.places[np.asarray(numbers, dtype=np.int64)].tolist()
        ranges = [ByteRange(self.files[at], offset, min(size, MAX_IMAGE_BYTES + 1)) for at, offset, size in places]
        return range_reader(self.source).stream(ranges)


def _is_archive(source: str) -> bool:
    """Whether it is a tar, or a directory that holds tars and not the folders themselves."""
    filesystem, path = resolve(source)
    info = filesystem.get_file_info(path)
    if info.type == fs.FileType.NotFound:
        raise FileNotFoundError(f"{source}: no such file or directory")
    if info.type == fs.FileType.File:
        return True
    return any(file.base_name.endswith(".tar") for file in filesystem.get_file_info(fs.FileSelector(path)))


def _archives(source: str) -> tuple[tuple[str, ...], list[_Entry]]:
    filesystem, _ = resolve(source)
    archives = list_archives(source, {".tar": ArchiveFormat.TAR})
    entries = []
    for number, archive in enumerate(archives):
        with filesystem.open_input_stream(archive.path, compression=None) as stream:
            try:
                for info, _ in tar_members(stream):
                    name = str(PurePosixPath(info.name))
                    if (info.isfile() or info.isdir()) and not _is_hidden(name):
                        entries.append(_Entry(name, info.isdir(), number, info.offset_data, info.size, info.mtime))
            except tarfile.TarError as error:
                raise ValueError(f"{archive.path} is cut or corrupt: {error}") from error
    return tuple(archive.path for archive in archives), entries


def _directory(source: str) -> tuple[tuple[str, ...], list[_Entry]]:
    filesystem, root = resolve(source)
    files: list[str] = []
    entries: list[_Entry] = []
    for file in filesystem.get_file_info(fs.FileSelector(root, recursive=True)):
        name = relative(file.path, root)
        if not _is_hidden(name):
            is_folder = file.type == fs.FileType.Directory
            entries.append(_Entry(name, is_folder, len(files), 0, file.size or 0, (file.mtime_ns or 0) / 1e9))
            files.append(file.path)
    return tuple(files), entries


def _is_hidden(name: str) -> bool:
    """`.DS_Store`, `__MACOSX/` and the like."""
    return any(part.startswith((".", "__")) for part in name.split("/"))


def _check_folders(source: str, entries: Sequence[_Entry], images: Sequence[_Entry]) -> None:
    """Refuse a folder that holds neither an image nor a folder that does: a class that nothing can be said about."""
    filled = {str(folder) for entry in images for folder in PurePosixPath(entry.name).parents}
    paths = (PurePosixPath(entry.name) for entry in entries)
    folders = {str(path if entry.is_folder else path.parent) for entry, path in zip(entries, paths, strict=True)}
    if empty := sorted(folders - filled):
        raise ValueError(f"{source}: the folder {empty[0]!r} of a class holds no image")
