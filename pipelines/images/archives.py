"""Read image–text samples from archives: WebDataset tars as img2dataset writes them, or image files in a directory.

What a sample is, webdataset's rule decides: consecutive members of a tar whose names agree up to the first dot of the base
name are one sample (`webdataset.tariterators.base_plus_ext`), for example `00001.jpg`, `00001.txt` and `00001.json`. Its
iterators are not used: they take a broken header for the end of the tar, skip links in silence, hold members of any size,
and do not say where an image's bytes lie, which reading in random order needs.

The same iterator also yields a `Problem` for each defect in the content, at the cost of as few samples as possible, and a
`LeftOut` for everything that is skipped on purpose, so that everything is counted. Nothing is extracted to disk.
"""

from __future__ import annotations

import json
import tarfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Literal

from pyarrow import fs

from pipelines.archives import ArchiveFormat, list_source, resolve_source
from pipelines.images.captions import CaptionFile, FolderNames
from pipelines.lines import MAGIC_BYTES, compression_of, decode, lines_of
from pipelines.object_store import open_for_reading
from pipelines.problems import Problem, ProblemKind, format_fields, name_type
from pipelines.storage import compute_digest, is_utf8, relative
from pipelines.tars import TarMember, member_end, num_bytes_behind, tar_members

MAX_IMAGE_BYTES = 2**26
"""Maximum size of an image file in bytes; a reader holds several files at its peak, and one decoded image."""
MAX_CAPTION_BYTES = 2**22

IMAGE_SUFFIXES = ("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff")

KeyDot = Literal["first", "last"]
"""Dot of a member's base name at which the key of its sample ends: webdataset's is the first."""

FOLDER_LABEL, CLS_LABEL = "folder", "cls"
"""Labels that are not named by a field of the `.json`: the folder of an image, and the text of its `.cls`."""

_SUFFIXES = {".tar": ArchiveFormat.TAR} | {f".{suffix}": ArchiveFormat.PLAIN for suffix in IMAGE_SUFFIXES}
# Number of image files of a directory that form one archive: the order of magnitude of what img2dataset puts into a
# tar.
_NUM_FILES_PER_ARCHIVE = 4096
# Number of members without a partner that are held until the end of a tar, where it is known whether their partners lie
# elsewhere in it.
_NUM_HELD = 2**16
_NUM_SUFFIXES_SHOWN = 5
_NUM_CHARACTERS_SHOWN = 40


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageArchive:
    """One unit of work: a tar, or a group of image files in a directory."""

    path: str
    """Path of the tar or of the directory, within the filesystem of the URI that it was listed from."""
    num_bytes: int
    """Size of the tar, or the total size of the files, in bytes."""
    version: str
    """Hash of the time of modification of the tar, or of those of the files."""
    files: tuple[str, ...] = ()
    """Paths of the image files relative to `path`; empty for a tar."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageSample:
    """Image, not yet decoded or checked, with at least one caption."""

    key: str
    """Name of the members up to the dot, or the image's path in the JSON file if captions come from one."""
    member: str
    offset: int
    """Position of the image's first byte in the tar, or 0 for an image in a file of its own."""
    data: bytes
    captions: tuple[str, ...]
    """Captions of the image, none of them empty."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LeftOut:
    """Member or file that belongs to no sample but is no problem either; such members are counted."""

    kind: str


Item = ImageSample | Problem | LeftOut

_SEVERAL_LINES = LeftOut(
    kind="line breaks in a caption (lines are captions if the caption of the .json is one of them)"
)


def list_image_archives(uri: str) -> list[ImageArchive]:
    """Return the archives of :func:`list_image_source`."""
    return list_image_source(uri)[0]


def list_image_source(uri: str) -> tuple[list[ImageArchive], list[str]]:
    """List the tars at a URI in order of path, then its image files in groups; return them and the names not read."""
    listing = list_source(uri, _SUFFIXES)
    filesystem, root = resolve_source(uri)
    is_directory = filesystem.get_file_info(root).type == fs.FileType.Directory
    directory = root if is_directory else str(PurePosixPath(root).parent)
    groups = [
        ImageArchive(path=archive.path, num_bytes=archive.num_bytes, version=compute_digest([archive.modified_ns]))
        for archive in listing.archives
        if archive.format is ArchiveFormat.TAR
    ]
    files = [archive for archive in listing.archives if archive.format is not ArchiveFormat.TAR]
    for first in range(0, len(files), _NUM_FILES_PER_ARCHIVE):
        group = files[first : first + _NUM_FILES_PER_ARCHIVE]
        names = tuple(relative(file.path, directory) for file in group)
        num_bytes, version = sum(file.num_bytes for file in group), compute_digest([file.modified_ns for file in group])
        groups.append(ImageArchive(path=directory, num_bytes=num_bytes, version=version, files=names))
    return groups, listing.not_read


def read_samples(
    uri: str,
    archive: ImageArchive,
    captions: CaptionFile | FolderNames | None = None,
    *,
    key_dot: KeyDot = "first",
    label: str = "",
) -> Iterator[Item]:
    """Stream the samples of one archive in stored order, with the problems and what is left out.

    Without a caption file, a sample is an image and a `.txt` or a `.json` with a field "captions" or "caption", stored
    under one key. If the field is a list, its entries are the captions; otherwise the `.txt` is preferred to the field. It is
    one caption, as img2dataset writes it, unless the field says that its lines are: by being one of them.
    With a caption file, which groups of image files need, samples are the images that it names; any other is left out.
    With a `label` the only caption of an image is its class (`pipelines.images.prepare.PrepareImagesConfig.label`).
    """
    filesystem, root = resolve_source(uri)
    name = relative(archive.path, root)
    if label == FOLDER_LABEL:
        captions = FolderNames()
    if archive.files:
        assert captions is not None
        yield from _read_files(filesystem, archive, captions)
        return
    with open_for_reading(filesystem, archive.path) as stream:
        if compression := compression_of(stream.read(MAGIC_BYTES)):
            detail = (
                f"the tar is compressed as a whole ({compression.rpartition('.')[2]}), and images are read from their places "
                "in it: decompress it"
            )
            yield Problem(ProblemKind.UNREADABLE_ARCHIVE, name, detail)
            return
        stream.seek(0)
        if captions is not None:
            yield from _read_named_images(tar_members(stream), name, captions, archive.num_bytes)
        else:
            yield from _TarReader(name, key_dot, archive.num_bytes, label).read(tar_members(stream))


# ---- WebDataset ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class _Part:
    """One member of a sample."""

    member: str
    offset: int
    data: bytes
    problem: Problem | None


Members = Iterator[tuple[tarfile.TarInfo, TarMember]]


class _TarReader:
    """Reads the samples of one tar, and keeps what is only known to be wrong at its end."""

    def __init__(self, name: str, key_dot: KeyDot, num_bytes: int, label: str) -> None:
        # Imported here because it also imports torch, and only tars of samples need it.
        from webdataset.tariterators import base_plus_ext

        self._name, self._num_bytes, self._label, self._key_dot = name, num_bytes, label, key_dot
        # Suffixes of the members that say what an image shows.
        self._texts = ("cls",) if label == CLS_LABEL else ("txt", "json")
        self._split: Callable[[str], tuple[str | None, str | None]] = (
            base_plus_ext if key_dot == "first" else _split_at_last_dot
        )
        self._left_out = Counter[str]()
        self._held: list[Problem] = []  # Samples that lack their image or captions, which may lie elsewhere in the tar.

    def read(self, members: Members) -> Iterator[Item]:
        """Yield everything that the tar holds."""
        is_empty = True
        for item in self._items(members):
            is_empty = is_empty and isinstance(item, LeftOut)
            yield item
        if is_empty:
            yield Problem(ProblemKind.EMPTY_ARCHIVE, self._name, self._describe_left_out())

    def _items(self, members: Members) -> Iterator[Item]:
        key, parts, end = "", dict[str, _Part](), 0
        truncated = None
        try:
            for info, member in members:
                end = member_end(info)
                if info.isdir():
                    continue
                found, suffix = self._split(info.name)
                suffix = (suffix or "").lower()
                if not found or suffix not in (*IMAGE_SUFFIXES, *self._texts):
                    kind = f".{suffix}" if found and suffix else "no suffix"
                    self._left_out[kind] += 1
                    yield LeftOut(kind=kind)
                    continue
                if found != key:
                    yield from self._decode(key, parts)
                    key, parts = found, {}
                part = _read_part(info, member, self._name)
                if suffix in parts:
                    detail = "the tar holds several members of this name; the first one stays"
                    yield Problem(ProblemKind.DUPLICATED_KEY, f"{self._name}/{key}", detail)
                else:
                    parts[suffix] = part
        except tarfile.TarError as error:
            truncated = _report_truncated(self._name, error, end, self._num_bytes)
        yield from self._decode(key, parts, is_cut=truncated is not None)
        yield from self._close()
        if truncated:
            yield truncated

    def _decode(self, key: str, parts: dict[str, _Part], *, is_cut: bool = False) -> Iterator[Item]:
        """Yield the sample that a group of members is, by suffix, and what is wrong with it."""
        where = f"{self._name}/{key}"
        images = [suffix for suffix in parts if suffix not in self._texts]
        yield from (LeftOut(kind="further images of a sample") for _ in images[1:])
        image = parts[images[0]] if images else None
        texts, items = _read_label(parts, self._label, where) if self._label else _read_captions(parts, where)
        if image is not None and texts and image.problem is None:
            yield from items
            yield ImageSample(key=key, member=image.member, offset=image.offset, data=image.data, captions=tuple(texts))
        elif is_cut or not parts:
            return  # What it lacks lies in the missing part.
        elif image is not None and (image.problem or items):
            yield from [image.problem] if image.problem else items
        else:
            names = ", ".join(part.member for part in parts.values())
            kind = ProblemKind.MISSING_CAPTION if images else ProblemKind.MISSING_IMAGE
            missing = f"no .{' or .'.join(self._texts)}" if images else "no image"
            self._held.append(Problem(kind, where, f"there is {names}, and {missing}"))
            if len(self._held) > _NUM_HELD:
                yield from self._close()

    def _close(self) -> Iterator[Problem]:
        """Yield the problems of samples that lack image or caption; those that have both, apart, are one problem."""
        places: dict[str, set[str]] = {}
        for problem in self._held:
            places.setdefault(problem.where, set()).add(problem.kind)
        apart = {where: kinds for where, kinds in places.items() if len(kinds) > 1}
        num_apart = len(apart)
        for problem in self._held:
            if problem.kind in (kinds := apart.get(problem.where, set())):
                kinds.remove(problem.kind)
            else:
                yield problem
        self._held.clear()
        if num_apart:
            detail = (
                f"image and caption of {num_apart} keys lie apart: members of a sample must follow each other, so write "
                "the tar in the order of names (tar --sort=name)"
            )
            yield Problem(ProblemKind.APART, self._name, detail, count=num_apart)

    def _describe_left_out(self) -> str:
        shown = ", ".join(f"{number} {kind}" for kind, number in self._left_out.most_common(_NUM_SUFFIXES_SHOWN))
        detail = f"no member is an image, a .txt or a .json; there is {shown or 'nothing'}"
        ends = tuple(f".{suffix}" for suffix in IMAGE_SUFFIXES)
        if self._key_dot == "first" and any(kind.endswith(ends) for kind in self._left_out):
            detail += (
                ". A key ends at the first dot of a name, as webdataset's do; key_dot = last lets it end at the last"
            )
        return detail


def _split_at_last_dot(name: str) -> tuple[str | None, str | None]:
    directory, slash, file = name.rpartition("/")
    stem, _, suffix = file.rpartition(".")
    return (directory + slash + stem, suffix) if stem else (None, None)


def _read_captions(parts: dict[str, _Part], where: str) -> tuple[list[str], list[Item]]:
    """Return the captions of a sample, and what is wrong with them or left out; both are empty if it has no caption file.

    A caption that is empty or no text costs itself. A file that cannot be read costs nothing if the other has captions.
    """
    record, record_problem = _caption_in_json(parts["json"], where) if "json" in parts else (None, None)
    text, text_problem = None, None
    if part := parts.get("txt"):
        try:
            text, text_problem = (None, part.problem) if part.problem else (decode(part.data), None)
        except UnicodeDecodeError as error:
            text_problem = Problem(ProblemKind.INVALID_UTF8, where, str(error))
    lines: list[object] = [line.strip() for line in lines_of(text or "") if line.strip()]
    if isinstance(record, list):
        texts = record
    elif isinstance(record, str) and len(lines) > 1 and record.strip() in lines:
        texts = lines
    elif text is not None or record is not None:
        texts = [record if text is None else text]
    else:
        return [], [problem for problem in (text_problem or record_problem,) if problem]
    captions, items = _check_captions(texts, where)
    if record_problem and record_problem.kind is not ProblemKind.MISSING_CAPTION:
        items.append(LeftOut(kind=".json that cannot be read"))
    if text_problem:
        items.append(LeftOut(kind=".txt that cannot be read"))
    return captions, items + [_SEVERAL_LINES for caption in captions if "\n" in caption]


def _read_label(parts: dict[str, _Part], label: str, where: str) -> tuple[list[str], list[Item]]:
    """Return the class of a sample as its only caption, or what is wrong with it; both are empty if it has no such file."""
    part = parts.get("cls" if label == CLS_LABEL else "json")
    if part is None:
        return [], []
    if part.problem:
        return [], [part.problem]
    try:
        value = decode(part.data) if label == CLS_LABEL else json.loads(part.data)[label]
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        detail = f"no class in {part.member}: {type(error).__name__} {str(error)[:_NUM_CHARACTERS_SHOWN]}"
        return [], [Problem(ProblemKind.MISSING_CAPTION, where, detail)]
    return _check_captions([str(value) if isinstance(value, int) else value], where)


def _caption_in_json(part: _Part, where: str) -> tuple[str | list[object] | None, Problem | None]:
    """Return the caption, or the list of captions, of a sample's JSON file, or the problem that there is none."""
    if part.problem:
        return None, part.problem
    try:
        record = json.loads(part.data)
    except (ValueError, RecursionError) as error:  # Bytes that are not UTF-8 raise a ValueError too.
        return None, Problem(ProblemKind.INVALID_JSON, where, f"no .txt, and {part.member} is no JSON: {error}")
    found = (record.get("captions") or record.get("caption")) if isinstance(record, dict) else None
    if isinstance(found, str) or (isinstance(found, list) and any(isinstance(text, str) for text in found)):
        return found, None
    has = f"which has {format_fields(record)}" if isinstance(record, dict) else "which is no object"
    detail = f'no .txt, and no text in a field "captions" or "caption" of {part.member}, {has}'
    return None, Problem(ProblemKind.MISSING_CAPTION, where, detail)


def _check_captions(texts: Iterable[object], where: str) -> tuple[list[str], list[Item]]:
    """Return the captions among the texts, without the white space around them, and the problems of the others."""
    captions, problems = list[str](), list[Item]()
    for text in texts:
        if not isinstance(text, str):
            kind = ProblemKind.INVALID_CAPTION
            detail = f"one of the captions is {name_type(text)}, not text"
        elif not text.strip():
            kind, detail = ProblemKind.EMPTY_CAPTION, "empty, or only whitespace"
        elif not is_utf8(text):  # JSON can encode half of a surrogate pair, which no tokenizer accepts.
            kind, detail = ProblemKind.INVALID_UTF8, "half of a surrogate pair"
        else:
            captions.append(text.strip())
            continue
        problems.append(Problem(kind, where, detail))
    return captions, problems


def _read_part(info: tarfile.TarInfo, member: TarMember, name: str) -> _Part:
    """Read a member's bytes, or explain in `problem` why they cannot be used; `name` is that of the tar, for messages."""
    where = f"{name}/{info.name}"
    limit = MAX_CAPTION_BYTES if info.name.lower().endswith(("txt", "json", "cls")) else MAX_IMAGE_BYTES
    data, problem = b"", None
    if info.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or info.sparse is not None:
        problem = Problem(ProblemKind.IRREGULAR_MEMBER, where, "a link, a sparse file or a device, not a plain file")
    elif info.size > limit:
        problem = _report_oversized(where, limit)
    else:
        data = member.read(info.size)
        if len(data) < info.size:
            raise tarfile.ReadError(f"it ends within {info.name}")
    return _Part(member=info.name, offset=info.offset_data, data=data, problem=problem)


# ---- captions in a json ----------------------------------------------------------------------------------------------


def _read_named_images(
    members: Members, name: str, captions: CaptionFile | FolderNames, num_bytes: int
) -> Iterator[Item]:
    end = 0
    try:
        for info, member in members:
            end = member_end(info)
            if info.isdir():
                continue
            suffix = PurePosixPath(info.name).suffix.lower()
            if suffix.removeprefix(".") not in IMAGE_SUFFIXES:
                yield LeftOut(kind=suffix or "no suffix")
            elif (key := captions.find(info.name)) is None:
                yield LeftOut(kind=captions.unnamed)
            else:
                part = _read_part(info, member, name)
                yield from _named_image(key, part, captions, f"{name}/{part.member}")
    except tarfile.TarError as error:
        yield _report_truncated(name, error, end, num_bytes)


def _read_files(
    filesystem: fs.FileSystem, archive: ImageArchive, captions: CaptionFile | FolderNames
) -> Iterator[Item]:
    for file in archive.files:
        key = captions.find(file)
        if key is None:
            yield LeftOut(kind=captions.unnamed)
            continue
        try:
            with open_for_reading(filesystem, f"{archive.path}/{file}") as stream:
                data = stream.read(MAX_IMAGE_BYTES + 1)
        except (FileNotFoundError, PermissionError) as error:  # Other errors concern the filesystem, not this file.
            yield Problem(ProblemKind.UNREADABLE_FILE, file, str(error))
            continue
        problem = _report_oversized(file, MAX_IMAGE_BYTES) if len(data) > MAX_IMAGE_BYTES else None
        yield from _named_image(key, _Part(member=file, offset=0, data=data, problem=problem), captions, file)


def _named_image(key: str, part: _Part, captions: CaptionFile | FolderNames, where: str) -> Iterator[Item]:
    if part.problem:
        yield part.problem
        return
    texts, problems = _check_captions(captions.texts(key), where)
    yield from problems
    if texts:
        yield ImageSample(key=key, member=part.member, offset=part.offset, data=part.data, captions=tuple(texts))


# ---- tars ------------------------------------------------------------------------------------------------------------


def _report_oversized(where: str, limit: int) -> Problem:
    return Problem(ProblemKind.OVERSIZED_MEMBER, where, f"longer than {limit} bytes")


def _report_truncated(name: str, error: tarfile.TarError, end: int, num_bytes: int) -> Problem:
    return Problem(
        kind=ProblemKind.TRUNCATED_ARCHIVE,
        where=name,
        detail=f"corrupt tar: {error}",
        num_bytes_unread=num_bytes_behind(end, num_bytes),
    )
