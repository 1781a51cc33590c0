"""Reading image–text samples out of archives: WebDataset tars as img2dataset writes them, or files in a directory.

A sample is an image and its captions. What is wrong with the content comes out of the same iterator as a `Problem` and
costs as little as it can; nothing is extracted, so a member's name is only ever a name. Memory holds one sample.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import PurePosixPath

from pyarrow import fs

from pipelines.archives import ArchiveFormat, list_archives, relative, resolve
from pipelines.caption_files import CaptionFile
from pipelines.problems import Problem
from pipelines.tars import TarMember, tar_members

MAX_IMAGE_BYTES = 2**28
MAX_CAPTION_BYTES = 2**22

IMAGE_SUFFIXES = ("jpg", "jpeg", "png", "webp")
_SUFFIXES = {".tar": ArchiveFormat.TAR} | {
    f".{spelling}": ArchiveFormat.PLAIN for suffix in IMAGE_SUFFIXES for spelling in (suffix, suffix.upper())
}
# Of a directory of files; as many as img2dataset puts into a tar, to an order of magnitude.
_NUM_FILES_PER_ARCHIVE = 4096


class SampleProblemKind(StrEnum):
    """Everything that can be wrong with a sample, beside its image's bytes."""

    TRUNCATED_ARCHIVE = "truncated_archive"
    """The tar ends early or cannot be read further; the complete samples before were yielded."""
    EMPTY_ARCHIVE = "empty_archive"
    MISSING_IMAGE = "missing_image"
    MISSING_CAPTION = "missing_caption"
    EMPTY_CAPTION = "empty_caption"
    INVALID_UTF8 = "invalid_utf8"
    OVERSIZED_MEMBER = "oversized_member"
    IRREGULAR_MEMBER = "irregular_member"
    """A link, a sparse file or a device under the name of an image or a caption."""
    DUPLICATED_KEY = "duplicated_key"
    ABSENT_IMAGE = "absent_image"
    """The captions' json names it, and no archive holds it."""


Members = Iterator[tuple[tarfile.TarInfo, TarMember]]


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageArchive:
    """One tar, or some of the image files of a directory."""

    path: str
    """The tar, or the directory; within the filesystem of the URI it was listed from."""
    num_bytes: int
    files: tuple[str, ...] = ()
    """Empty for a tar; else paths below `path`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageSample:
    """An image, not yet looked at, with at least one caption."""

    key: str
    """WebDataset's key, or, where captions come from a json, the path by which it names the image."""
    member: str
    """The image's name in the tar, or its path below the directory."""
    offset: int
    """Where the image's bytes begin in the file."""
    data: bytes
    captions: tuple[str, ...]


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


def read_samples(
    uri: str, archive: ImageArchive, captions: CaptionFile | None = None
) -> Iterator[ImageSample | Problem]:
    """Stream the samples of one archive, in the order they are stored in.

    Without a caption file, a sample is WebDataset's: consecutive members of a tar with the same name up to its first dot,
    an image beside a `.txt` or a `.json` with a field "captions" or "caption". A list there is several captions of the
    image and is preferred; otherwise the `.txt` is. With a caption file, samples are the images that it names, and nothing else is
    looked at.

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
        for item in _webdataset_samples(tar_members(stream), name):
            is_empty = False
            yield item
        if is_empty:
            detail = "no member is an image, a .txt or a .json"
            yield Problem(kind=SampleProblemKind.EMPTY_ARCHIVE, where=name, detail=detail)


# ---- WebDataset ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class _Part:
    """One member of a sample."""

    member: str
    offset: int
    data: bytes
    problem: Problem | None


def _webdataset_samples(members: Members, name: str) -> Iterator[ImageSample | Problem]:
    key = ""
    parts: dict[str, _Part] = {}  # by role: image, txt, json
    try:
        for info, member in members:
            member_key, suffix = _key_and_suffix(info.name)
            role = "image" if suffix in IMAGE_SUFFIXES else suffix
            if role not in ("image", "txt", "json"):
                continue
            if parts and (member_key != key or role in parts):
                yield from _sample_of_parts(parts, key, f"{name}/{key}")
                parts = {}
            key, parts[role] = member_key, _read_part(info, member, name)
    except tarfile.TarError as error:
        # A sample that can be told to be complete is one; any other is part of what is cut off.
        last = list(_sample_of_parts(parts, key, f"{name}/{key}")) if parts else []
        if any(isinstance(item, ImageSample) for item in last):
            yield from last
        yield _truncated(name, error)
    else:
        if parts:
            yield from _sample_of_parts(parts, key, f"{name}/{key}")


def _key_and_suffix(name: str) -> tuple[str, str]:
    """`a/b.seg.png` → `a/b`, `seg.png`, in small letters: WebDataset's rule; hidden files have no suffix."""
    directory, slash, file = _printable(name).rpartition("/")
    stem, _, suffix = file.partition(".")
    return directory + slash + stem, suffix.lower() if stem else ""


def _sample_of_parts(parts: dict[str, _Part], key: str, where: str) -> Iterator[ImageSample | Problem]:
    problem = next((part.problem for part in parts.values() if part.problem), None)
    if problem:
        yield problem
    elif "image" not in parts:
        detail = f"there is only {', '.join(part.member for part in parts.values())}"
        yield Problem(kind=SampleProblemKind.MISSING_IMAGE, where=where, detail=detail)
    else:
        texts = _caption_texts(parts, where)
        if isinstance(texts, Problem):
            yield texts
        else:
            image = parts["image"]
            yield from _checked(key, image.member, image.offset, image.data, texts, where)


def _caption_texts(parts: dict[str, _Part], where: str) -> Sequence[str] | Problem:
    caption = None
    if "json" in parts:
        try:
            record = json.loads(parts["json"].data)
            caption = (record.get("captions") or record.get("caption")) if isinstance(record, dict) else None
        except (ValueError, RecursionError):  # bytes that are no UTF-8, too
            pass
    if isinstance(caption, list) and all(isinstance(text, str) for text in caption) and caption:
        return caption
    if "txt" in parts:
        try:
            return [parts["txt"].data.decode()]
        except UnicodeDecodeError as error:
            return Problem(kind=SampleProblemKind.INVALID_UTF8, where=where, detail=str(error))
    if isinstance(caption, str):
        return [caption]
    detail = "no .txt" + (', and no field "caption" in the .json' if "json" in parts else " and no .json")
    return Problem(kind=SampleProblemKind.MISSING_CAPTION, where=where, detail=detail)


# ---- captions in a json ----------------------------------------------------------------------------------------------


def _named_images(members: Members, name: str, captions: CaptionFile) -> Iterator[ImageSample | Problem]:
    try:
        for info, member in members:
            if info.name.rpartition(".")[2].lower() not in IMAGE_SUFFIXES:
                continue
            key = captions.find(_printable(info.name))
            if key is None:
                continue
            part = _read_part(info, member, name)
            if part.problem:
                yield part.problem
            else:
                texts = captions.captions[key]
                yield from _checked(key, part.member, part.offset, part.data, texts, f"{name}/{part.member}")
    except tarfile.TarError as error:
        yield _truncated(name, error)


def _read_files(
    filesystem: fs.FileSystem, archive: ImageArchive, captions: CaptionFile
) -> Iterator[ImageSample | Problem]:
    for file in archive.files:
        key = captions.find(file)
        if key is None:
            continue
        with filesystem.open_input_stream(f"{archive.path}/{file}", compression=None) as stream:
            data = stream.read(MAX_IMAGE_BYTES + 1)
        if len(data) > MAX_IMAGE_BYTES:
            yield _oversized(file, MAX_IMAGE_BYTES)
        else:
            yield from _checked(key, file, 0, data, captions.captions[key], file)


# ---- parts -----------------------------------------------------------------------------------------------------------


def _read_part(info: tarfile.TarInfo, member: TarMember, name: str) -> _Part:
    """A member's bytes, or why they are not to be had.

    Raises:
        tarfile.TarError: if the archive ends before the member does.
    """
    printable = _printable(info.name)
    where = f"{name}/{printable}"
    limit = MAX_CAPTION_BYTES if printable.lower().endswith(("txt", "json")) else MAX_IMAGE_BYTES
    data, problem = b"", None
    if info.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or info.sparse is not None:
        detail = "a link, a sparse file or a device, not a plain file"
        problem = Problem(kind=SampleProblemKind.IRREGULAR_MEMBER, where=where, detail=detail)
    elif info.size > limit:
        problem = _oversized(where, limit)
    else:
        data = member.read(info.size)
        if len(data) < info.size:
            raise tarfile.ReadError(f"it ends within {printable}")
    return _Part(member=printable, offset=info.offset_data, data=data, problem=problem)


def _checked(
    key: str, member: str, offset: int, data: bytes, texts: Sequence[str], where: str
) -> Iterator[ImageSample | Problem]:
    """The sample with the captions that hold something, and a problem for each that does not."""
    captions = []
    for text in texts:
        stripped = text.strip()
        if not stripped:
            yield Problem(kind=SampleProblemKind.EMPTY_CAPTION, where=where, detail="empty, or only whitespace")
            continue
        try:
            stripped.encode()
        except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair, and no tokenizer takes it.
            yield Problem(kind=SampleProblemKind.INVALID_UTF8, where=where, detail=str(error))
            continue
        captions.append(stripped)
    if captions:
        yield ImageSample(key=key, member=member, offset=offset, data=data, captions=tuple(captions))


def _printable(name: str) -> str:
    """A member's name as UTF-8, whatever bytes it is made of."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def _oversized(where: str, limit: int) -> Problem:
    return Problem(kind=SampleProblemKind.OVERSIZED_MEMBER, where=where, detail=f"longer than {limit} bytes")


def _truncated(name: str, error: tarfile.TarError) -> Problem:
    return Problem(kind=SampleProblemKind.TRUNCATED_ARCHIVE, where=name, detail=f"corrupt tar: {error}")
