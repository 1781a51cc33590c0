"""Reading image–text samples out of archives: WebDataset tars as img2dataset writes them, or files in a directory.

What is wrong with the content comes out of the same iterator as a `Problem` and costs as little as it can, and what is left
out knowingly comes as `LeftOut`, so that everything is counted; nothing is extracted, so a member's name is only ever a name.
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
    checked,
    member_end,
    oversized,
    printable,
    read_part,
    truncated,
    webdataset_samples,
)
from pipelines.problems import Problem
from pipelines.storage import relative, resolve
from pipelines.tars import tar_members

_SUFFIXES = {".tar": ArchiveFormat.TAR} | {
    f".{spelling}": ArchiveFormat.PLAIN for suffix in IMAGE_SUFFIXES for spelling in (suffix, suffix.upper())
}
# Of a directory of files; as many as img2dataset puts into a tar, to an order of magnitude.
_NUM_FILES_PER_ARCHIVE = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageArchive:
    """One tar, or some of the image files of a directory."""

    path: str
    """The tar, or the directory; within the filesystem of the URI it was listed from."""
    num_bytes: int
    files: tuple[str, ...] = ()
    """Empty for a tar; else paths below `path`."""


def list_image_archives(uri: str) -> list[ImageArchive]:
    """The tars at a URI, and its image files in groups, in order of path.

    Raises as `list_archives`.
    """
    archives = list_archives(uri, _SUFFIXES)
    filesystem, root = resolve(uri)
    is_directory = filesystem.get_file_info(root).type == fs.FileType.Directory
    directory = root if is_directory else str(PurePosixPath(root).parent)
    found = [
        ImageArchive(path=archive.path, num_bytes=archive.num_bytes)
        for archive in archives
        if archive.format is ArchiveFormat.TAR
    ]
    files = [archive for archive in archives if archive.format is not ArchiveFormat.TAR]
    for first in range(0, len(files), _NUM_FILES_PER_ARCHIVE):
        group = files[first : first + _NUM_FILES_PER_ARCHIVE]
        names = tuple(str(PurePosixPath(file.path).relative_to(directory)) for file in group)
        found.append(ImageArchive(path=directory, num_bytes=sum(file.num_bytes for file in group), files=names))
    return found


def read_samples(uri: str, archive: ImageArchive, captions: CaptionFile | None = None) -> Iterator[Item]:
    """Stream the samples of one archive, in the order they are stored in.

    Without a caption file, a sample is a WebDataset's: consecutive members of a tar with the same name up to its last dot
    (see `pipelines.images.samples`), an image beside a `.txt` or a `.json` with a field "captions" or "caption". A list
    there is several captions of the image and is preferred; otherwise the `.txt` is. With a caption file, samples are the
    images that it names, and any other image is left out.

    Raises OSError if the archive cannot be opened or the filesystem fails.
    """
    filesystem, root = resolve(uri)
    name = relative(archive.path, root)
    if archive.files:
        assert captions is not None
        yield from _read_files(filesystem, archive, captions)
        return
    # Without `compression=None` pyarrow would itself undo what the suffix suggests.
    with filesystem.open_input_stream(archive.path, compression=None) as stream:
        if captions is not None:
            yield from _named_images(tar_members(stream), name, captions)
            return
        is_empty = True
        for item in webdataset_samples(tar_members(stream), name):
            is_empty = is_empty and isinstance(item, LeftOut)
            yield item
        if is_empty:
            detail = "no member is an image, a .txt or a .json"
            yield Problem(kind=SampleProblemKind.EMPTY_ARCHIVE, where=name, detail=detail)


# ---- captions in a json ----------------------------------------------------------------------------------------------

_NOT_NAMED = LeftOut(kind="images that the captions do not name")


def _named_images(members: Members, name: str, captions: CaptionFile) -> Iterator[Item]:
    end = 0
    try:
        for info, member in members:
            end = member_end(info)
            if info.isdir():
                continue
            file = PurePosixPath(printable(info.name))
            if file.suffix.lower().removeprefix(".") not in IMAGE_SUFFIXES:
                yield LeftOut(kind=file.suffix.lower() or "no suffix")
                continue
            key = captions.find(printable(info.name))
            if key is None:
                yield _NOT_NAMED
                continue
            part = read_part(info, member, name)
            if part.problem:
                yield part.problem
            else:
                texts = captions.captions[key]
                yield from checked(key, part.member, part.offset, part.data, texts, f"{name}/{part.member}")
    except tarfile.TarError as error:
        yield truncated(name, error, end)


def _read_files(filesystem: fs.FileSystem, archive: ImageArchive, captions: CaptionFile) -> Iterator[Item]:
    for file in archive.files:
        key = captions.find(file)
        if key is None:
            yield _NOT_NAMED
            continue
        try:
            with filesystem.open_input_stream(f"{archive.path}/{file}", compression=None) as stream:
                data = stream.read(MAX_IMAGE_BYTES + 1)
        except (FileNotFoundError, PermissionError) as error:  # any other is the filesystem's, not the file's
            yield Problem(kind=SampleProblemKind.UNREADABLE_FILE, where=file, detail=str(error))
            continue
        if len(data) > MAX_IMAGE_BYTES:
            yield oversized(file, MAX_IMAGE_BYTES)
        else:
            yield from checked(key, file, 0, data, captions.captions[key], file)
