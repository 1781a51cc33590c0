"""Images by number, as input to a model: those of class folders, and those of prepared image–text data.

The class of an image in folders is the last folder of its path: `train/airplane/0001.jpg` and `test/airplane/0001.jpg` both
belong to the class `airplane`. Nothing is extracted: only the location of every image's bytes is stored. Damaged images
are reported.

Shapes: n images, S side of the image.
"""

from __future__ import annotations

import hashlib
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import NamedTuple, Protocol

import numpy as np
from pyarrow import fs
from transformers import PreTrainedTokenizerFast

from jobs.engine.fields import absolute_path
from pipelines.archives import ArchiveFormat, list_archives, list_once
from pipelines.images.archives import IMAGE_SUFFIXES, MAX_IMAGE_BYTES
from pipelines.images.decoding import ImageError
from pipelines.images.manifest import ImageManifest
from pipelines.images.pairs import PairSource
from pipelines.images.views import evaluation_view
from pipelines.ranges import ByteRange, range_reader
from pipelines.storage import relative, resolve
from pipelines.tars import tar_members

_SUFFIXES = tuple(f".{suffix}" for suffix in IMAGE_SUFFIXES)


class _Entry(NamedTuple):
    """A member of an archive, or a file or folder of a directory."""

    name: str
    """Its path relative to the root of the archive or directory."""
    is_folder: bool
    archive: int
    offset: int
    num_bytes: int
    stamp: float
    """Time of its last modification, in seconds since the epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassFolders:
    """The images of a data set, numbered from 0, with their classes. Shapes: n images."""

    source: str
    files: tuple[str, ...]
    """The image files, or the archives that contain the images: paths within the filesystem of `source`."""
    names: tuple[str, ...]
    """(n,) names of the images, for messages."""
    places: np.ndarray
    """(n, 3) int64: the number of the image's file in `files`, its offset in that file, and its size in bytes."""
    folders: tuple[str, ...]
    """Names of the class folders, sorted."""
    labels: np.ndarray
    """(n,) int64: the number of each image's folder in `folders`."""
    num_left_out: int
    """Number of files that do not have the name of an image."""
    digest: str
    """Digest that changes whenever an image is added, removed, renamed or changed."""

    @classmethod
    def read(cls, source: str) -> ClassFolders:
        """List the images at a path or URI.

        Raises:
            FileNotFoundError: if the path does not exist.
            ValueError: if an archive is truncated, an image is outside any folder, a folder has no images, or there are
                none at all.
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
        """Number of images."""
        return len(self.names)

    def read_bytes(self, numbers: Sequence[int]) -> Iterator[bytes]:
        """Yields the encoded bytes of the images; an image over the size limit is cut one byte past it."""
        places = self.places[np.asarray(numbers, dtype=np.int64)].tolist()
        ranges = [ByteRange(self.files[at], offset, min(size, MAX_IMAGE_BYTES + 1)) for at, offset, size in places]
        return range_reader(self.source).stream(ranges)


def _is_archive(source: str) -> bool:
    """Returns whether the source is a tar or a directory of tars, as opposed to a directory of class folders."""
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
    for file in list_once(filesystem, root):
        name = relative(file.path, root)
        if not _is_hidden(name):
            is_folder = file.type == fs.FileType.Directory
            entries.append(_Entry(name, is_folder, len(files), 0, file.size or 0, (file.mtime_ns or 0) / 1e9))
            files.append(file.path)
    return tuple(files), entries


def _is_hidden(name: str) -> bool:
    """Returns whether a path is hidden, such as `.DS_Store` or `__MACOSX/`."""
    return any(part.startswith((".", "__")) for part in name.split("/"))


def _check_folders(source: str, entries: Sequence[_Entry], images: Sequence[_Entry]) -> None:
    """Check that every folder contains an image or a subfolder that does; accuracy on an empty class is undefined."""
    filled = {str(folder) for entry in images for folder in PurePosixPath(entry.name).parents}
    paths = (PurePosixPath(entry.name) for entry in entries)
    folders = {str(path if entry.is_folder else path.parent) for entry, path in zip(entries, paths, strict=True)}
    if empty := sorted(folders - filled):
        raise ValueError(f"{source}: the folder {empty[0]!r} of a class holds no image")


class ImageSet(Protocol):
    """Images with the numbers 0 … num_images − 1."""

    @property
    def num_images(self) -> int: ...

    @property
    def digest(self) -> str:
        """Digest that differs if the images or their order differ."""

    def read(self, numbers: Sequence[int], image_size: int) -> Iterator[np.ndarray | ImageProblem]:
        """Yields, for each number, the image as uint8 (S, S, 3), or the reason why it cannot be used."""


@dataclass(frozen=True, slots=True)
class ImageProblem:
    """An image that cannot be used."""

    text: str
    """Name of the image, and the reason why it cannot be used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderImages:
    """The images of class folders."""

    folders: ClassFolders
    max_pixels: int

    @property
    def num_images(self) -> int:
        return self.folders.num_images

    @property
    def digest(self) -> str:
        return self.folders.digest

    def read(self, numbers: Sequence[int], image_size: int) -> Iterator[np.ndarray | ImageProblem]:
        for number, data in zip(numbers, self.folders.read_bytes(numbers), strict=True):
            if len(data) > MAX_IMAGE_BYTES:
                yield ImageProblem(f"{self.folders.names[number]} (longer than {MAX_IMAGE_BYTES} bytes)")
                continue
            try:
                yield evaluation_view(data, image_size, max_pixels=self.max_pixels)
            except ImageError as error:
                yield ImageProblem(f"{self.folders.names[number]} ({error.kind}: {error})")


@dataclass(frozen=True, slots=True, kw_only=True)
class PairImages:
    """The images of a prepared image–text data set. All are readable, since preparation left out the others."""

    manifest: ImageManifest
    tokenizer: PreTrainedTokenizerFast

    @property
    def num_images(self) -> int:
        return self.manifest.num_images

    @property
    def digest(self) -> str:
        return self.manifest.digest

    def source(self, image_size: int) -> PairSource:
        """Returns a source that reads the images at a size."""
        return PairSource(manifest=self.manifest, tokenizer=self.tokenizer, image_size=image_size)

    def read(self, numbers: Sequence[int], image_size: int) -> Iterator[np.ndarray | ImageProblem]:
        yield from self.source(image_size).read_images(numbers)


def read_images(images: ImageSet, numbers: Sequence[int], image_size: int) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Read images by number.

    Returns:
        the usable images as uint8 (n, S, S, 3), their numbers (n,), and a description of each unusable image.
    """
    kept, views, problems = [], [], []
    for number, view in zip(numbers, images.read(numbers, image_size), strict=True):
        if isinstance(view, ImageProblem):
            problems.append(view.text)
        else:
            kept.append(number)
            views.append(view)
    shape = (0, image_size, image_size, 3)
    return np.stack(views) if views else np.empty(shape, np.uint8), np.array(kept, dtype=np.int64), problems
