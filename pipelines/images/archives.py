"""Read image–text samples from archives: WebDataset tars as img2dataset writes them, or image files in a directory.

The same iterator also yields a `Problem` for each defect in the content, at the cost of as few samples as possible,
and a `LeftOut` for everything that is skipped on purpose, so that everything is counted. Nothing is extracted to
disk, so a member's name is never used as a path.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

from pyarrow import fs

from pipelines.archives import ArchiveFormat, list_archives
from pipelines.images.caption_files import CaptionFile
from pipelines.images.samples import (
    IMAGE_SUFFIXES,
    MAX_IMAGE_BYTES,
    Item,
    LeftOut,
    Members,
    SampleProblemKind,
    check_captions,
    make_printable,
    member_end,
    read_part,
    report_oversized,
    report_truncated,
)
from pipelines.images.webdataset import webdataset_samples
from pipelines.object_store import open_for_reading
from pipelines.parts import WHOLE, Part
from pipelines.problems import Problem
from pipelines.storage import relative, resolve
from pipelines.tars import tar_members

_SUFFIXES = {".tar": ArchiveFormat.TAR} | {
    f".{spelling}": ArchiveFormat.PLAIN for suffix in IMAGE_SUFFIXES for spelling in (suffix, suffix.upper())
}
# Number of image files of a directory that form one archive: the order of magnitude of what img2dataset puts into a
# tar.
_NUM_FILES_PER_ARCHIVE = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageArchive:
    """One unit of work: a tar, or a group of image files in a directory."""

    path: str
    """Path of the tar or of the directory, within the filesystem of the URI that it was listed from."""
    num_bytes: int
    """Size of the tar, or the total size of the files, in bytes."""
    files: tuple[str, ...] = ()
    """Paths of the image files relative to `path`; empty for a tar."""


def list_image_archives(uri: str) -> list[ImageArchive]:
    """List the tars at a URI in order of path, followed by its image files in groups, also in order of path.

    Raises:
        FileNotFoundError: if the path does not exist or is a directory with neither tars nor images.
        ValueError: if the path is a file with an unknown suffix.
    """
    archives = list_archives(uri, _SUFFIXES)
    filesystem, root = resolve(uri)
    is_directory = filesystem.get_file_info(root).type == fs.FileType.Directory
    directory = root if is_directory else str(PurePosixPath(root).parent)
    groups = [
        ImageArchive(path=archive.path, num_bytes=archive.num_bytes)
        for archive in archives
        if archive.format is ArchiveFormat.TAR
    ]
    files = [archive for archive in archives if archive.format is not ArchiveFormat.TAR]
    for first in range(0, len(files), _NUM_FILES_PER_ARCHIVE):
        group = files[first : first + _NUM_FILES_PER_ARCHIVE]
        names = tuple(str(PurePosixPath(file.path).relative_to(directory)) for file in group)
        groups.append(ImageArchive(path=directory, num_bytes=sum(file.num_bytes for file in group), files=names))
    return groups


def read_samples(
    uri: str, archive: ImageArchive, captions: CaptionFile | None = None, *, part: Part = WHOLE
) -> Iterator[Item]:
    """Stream the samples of one archive, or of a part of it, in stored order, with the problems and what is left out.

    Without a caption file, samples are those of WebDataset: consecutive members of a tar whose names agree up to the
    last dot (see `pipelines.images.webdataset`), namely an image and a `.txt` or a `.json` with a field "captions" or
    "caption". If that field is a list, its entries are the captions of the image; otherwise the `.txt` is preferred
    to the field. With a caption file, samples are the images that it names, and any other image is left out.

    Args:
        uri: the URI that `archive` was listed from.
        archive: one of `list_image_archives(uri)`.
        captions: captions by image path; required if the archive is a group of image files.
        part: the part of a tar to read, one of `pipelines.images.units.divide_archive`. Reading all of them in order
            yields what reading the whole tar does.

    Raises:
        OSError: if the archive cannot be opened or the filesystem fails.
    """
    filesystem, root = resolve(uri)
    name = relative(archive.path, root)
    if archive.files:
        assert captions is not None
        yield from _read_files(filesystem, archive, captions)
        return
    with open_for_reading(filesystem, archive.path, stop=part.stop) as stream:
        stream.seek(part.start)
        members = tar_members(stream, start=part.start, stop=part.stop)
        if captions is not None:
            yield from _read_named_images(members, name, captions)
            return
        is_empty = True
        for item in webdataset_samples(members, name):
            is_empty = is_empty and isinstance(item, LeftOut)
            yield item
        if is_empty and part.is_whole:  # A tar that is divided holds several samples.
            detail = "no member is an image, a .txt or a .json"
            yield Problem(kind=SampleProblemKind.EMPTY_ARCHIVE, where=name, detail=detail)


# ---- captions in a json ----------------------------------------------------------------------------------------------

_NOT_NAMED = LeftOut(kind="images that the captions do not name")


def _read_named_images(members: Members, name: str, captions: CaptionFile) -> Iterator[Item]:
    end = 0
    try:
        for info, member in members:
            end = member_end(info)
            if info.isdir():
                continue
            file = PurePosixPath(make_printable(info.name))
            if file.suffix.lower().removeprefix(".") not in IMAGE_SUFFIXES:
                yield LeftOut(kind=file.suffix.lower() or "no suffix")
                continue
            key = captions.find(make_printable(info.name))
            if key is None:
                yield _NOT_NAMED
                continue
            part = read_part(info, member, name)
            if part.problem:
                yield part.problem
            else:
                texts = captions.captions[key]
                yield from check_captions(key, part.member, part.offset, part.data, texts, f"{name}/{part.member}")
    except tarfile.TarError as error:
        yield report_truncated(name, error, end)


def _read_files(filesystem: fs.FileSystem, archive: ImageArchive, captions: CaptionFile) -> Iterator[Item]:
    for file in archive.files:
        key = captions.find(file)
        if key is None:
            yield _NOT_NAMED
            continue
        try:
            with open_for_reading(filesystem, f"{archive.path}/{file}") as stream:
                data = stream.read(MAX_IMAGE_BYTES + 1)
        except (FileNotFoundError, PermissionError) as error:  # Other errors concern the filesystem, not this file.
            yield Problem(kind=SampleProblemKind.UNREADABLE_FILE, where=file, detail=str(error))
            continue
        if len(data) > MAX_IMAGE_BYTES:
            yield report_oversized(file, MAX_IMAGE_BYTES)
        else:
            yield from check_captions(key, file, 0, data, captions.captions[key], file)
