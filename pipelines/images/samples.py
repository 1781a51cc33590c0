"""Image–text samples: what belongs together among the members of a tar, and what is wrong with it.

A sample is an image and its captions: consecutive members of one name, `photo.v1.2.jpg` and `photo.v1.2.txt`. The key of a
member is its name up to the last dot. (WebDataset takes the first dot, by which these two would be no image and no text; for
names with one dot both rules are one.) What is beside a sample under a longer name, as `photo.seg.png` is beside `photo.jpg`
and `photo.txt`, and has no partner of its own, is left out and counted.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from pipelines.problems import Problem
from pipelines.tars import TarMember

MAX_IMAGE_BYTES = 2**26
"""Of an image file; a reader holds several at its peak, beside what one of them is decoded to."""
MAX_CAPTION_BYTES = 2**22

IMAGE_SUFFIXES = ("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff")

TAR_BLOCK_BYTES = 512


class SampleProblemKind(StrEnum):
    """Everything that can be wrong with a sample, beside its image's bytes."""

    TRUNCATED_ARCHIVE = "truncated_archive"
    """The tar ends early or cannot be read further; the complete samples before were yielded."""
    UNREAD_SAMPLE = "unread_sample"
    """Behind the place where a tar cannot be read further; their number is estimated from bytes."""
    EMPTY_ARCHIVE = "empty_archive"
    MISSING_IMAGE = "missing_image"
    MISSING_CAPTION = "missing_caption"
    EMPTY_CAPTION = "empty_caption"
    INVALID_UTF8 = "invalid_utf8"
    OVERSIZED_MEMBER = "oversized_member"
    IRREGULAR_MEMBER = "irregular_member"
    """A link, a sparse file or a device under the name of an image or a caption."""
    UNREADABLE_FILE = "unreadable_file"
    """An image file that is listed and cannot be opened: gone since, a link to nowhere, or not permitted."""
    DUPLICATED_KEY = "duplicated_key"
    ABSENT_IMAGE = "absent_image"
    """The captions' json names it, and no archive holds it."""


Members = Iterator[tuple[tarfile.TarInfo, TarMember]]


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageSample:
    """An image, not yet looked at, with at least one caption."""

    key: str
    """The member's name up to its last dot, or, where captions come from a json, the path by which it names the image."""
    member: str
    """The image's name in the tar, or its path below the directory."""
    offset: int
    """Where the image's bytes begin in the file."""
    data: bytes
    captions: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class LeftOut:
    """A member or file that is no part of any sample, and no problem either; it is counted."""

    kind: str
    """Its suffix, or why it is left out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TruncatedArchive(Problem):
    """A tar that cannot be read further."""

    num_bytes_read: int
    """Where its last member that has a header ends, or should end."""


Item = ImageSample | Problem | LeftOut


# ---- grouping --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One member of a sample."""

    member: str
    offset: int
    data: bytes
    problem: Problem | None


Parts = dict[str, Part]  # by role: image, txt, json


class _Group:
    """The samples under one WebDataset key: all members whose names are the same up to the first dot.

    Memory holds two samples: the one whose members are being read, and the one of the shortest name that its own extends.
    """

    def __init__(self, key: str, archive: str) -> None:
        self.key = key
        self._archive = archive
        self._pending: dict[str, Parts] = {}
        self._last = ""
        self._seen: set[str] = set()
        # Only when the group has ended is it known whether they stood beside a sample.
        self._without_partner: list[tuple[str, str, Problem]] = []

    def add(self, key: str, role: str, part: Part) -> Iterator[Item]:
        """Take a member in; yields samples that no further member can belong to."""
        base = min((other for other in self._pending if key.startswith(other + ".")), key=len, default=key)
        for other in [other for other in self._pending if other not in (key, base)]:
            yield from self._close(other)
        if role in self._pending.get(key, {}):
            yield from self._close(key)
        self._last = key
        self._seen.add(key)
        self._pending.setdefault(key, {})[role] = part

    def close(self, *, is_cut: bool = False) -> Iterator[Item]:
        """Yield all that is left; a last sample that is not complete is part of what is cut off."""
        for key in list(self._pending):
            is_last = is_cut and key == self._last
            closed = list(self._close(key))
            yield from (item for item in closed if isinstance(item, ImageSample) or not is_last)
            if is_last and not closed:
                self._without_partner.pop()
        for key, member, problem in self._without_partner:
            prefixes = (key[:at] for at, character in enumerate(key) if character == ".")
            base = next((prefix for prefix in prefixes if prefix in self._seen), None)
            yield problem if base is None else LeftOut(kind=member[len(base) :].lower())

    def _close(self, key: str) -> Iterator[Item]:
        parts, where = self._pending.pop(key), f"{self._archive}/{key}"
        problem = next((part.problem for part in parts.values() if part.problem), None)
        texts = _caption_texts(parts, where) if "image" in parts else _missing_image(parts, where)
        if problem:
            yield problem
        elif not isinstance(texts, Problem):
            image = parts["image"]
            yield from checked(key, image.member, image.offset, image.data, texts, where)
        elif texts.kind in (SampleProblemKind.MISSING_IMAGE, SampleProblemKind.MISSING_CAPTION):
            self._without_partner.append((key, next(iter(parts.values())).member, texts))
        else:
            yield texts


def webdataset_samples(members: Members, name: str) -> Iterator[Item]:
    """The samples of a tar, in the order in which they are complete."""
    group, end = _Group("", name), 0
    try:
        for info, member in members:
            end = member_end(info)
            if info.isdir():
                continue
            key, suffix = _key_and_suffix(info.name)
            role = "image" if suffix in IMAGE_SUFFIXES else suffix
            if role not in ("image", "txt", "json"):
                yield LeftOut(kind=f".{suffix}" if suffix else "no suffix")
                continue
            if (group_key := _first_dot(key)) != group.key:
                yield from group.close()
                group = _Group(group_key, name)
            yield from group.add(key, role, read_part(info, member, name))
    except tarfile.TarError as error:
        yield from group.close(is_cut=True)
        yield truncated(name, error, end)
    else:
        yield from group.close()


def member_end(info: tarfile.TarInfo) -> int:
    """Where a member's data end in the tar, padding included."""
    return info.offset_data + -(-info.size // TAR_BLOCK_BYTES) * TAR_BLOCK_BYTES


def _key_and_suffix(name: str) -> tuple[str, str]:
    """`a/b.v1.PNG` → `a/b.v1`, `png`; hidden files have no suffix."""
    directory, slash, file = printable(name).rpartition("/")
    stem, _, suffix = file.rpartition(".")
    is_hidden = file.startswith(".")
    return directory + slash + stem, "" if is_hidden or not stem else suffix.lower()


def _first_dot(key: str) -> str:
    directory, slash, file = key.rpartition("/")
    return directory + slash + file.partition(".")[0]


def _missing_image(parts: Parts, where: str) -> Problem:
    detail = f"there is only {', '.join(part.member for part in parts.values())}"
    return Problem(kind=SampleProblemKind.MISSING_IMAGE, where=where, detail=detail)


def _caption_texts(parts: Parts, where: str) -> Sequence[str] | Problem:
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


# ---- parts -----------------------------------------------------------------------------------------------------------


def read_part(info: tarfile.TarInfo, member: TarMember, name: str) -> Part:
    """A member's bytes, or why they are not to be had.

    Raises:
        tarfile.TarError: if the archive ends before the member does.
    """
    member_name = printable(info.name)
    where = f"{name}/{member_name}"
    limit = MAX_CAPTION_BYTES if member_name.lower().endswith(("txt", "json")) else MAX_IMAGE_BYTES
    data, problem = b"", None
    if info.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or info.sparse is not None:
        detail = "a link, a sparse file or a device, not a plain file"
        problem = Problem(kind=SampleProblemKind.IRREGULAR_MEMBER, where=where, detail=detail)
    elif info.size > limit:
        problem = oversized(where, limit)
    else:
        data = member.read(info.size)
        if len(data) < info.size:
            raise tarfile.ReadError(f"it ends within {member_name}")
    return Part(member=member_name, offset=info.offset_data, data=data, problem=problem)


def checked(
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


def printable(name: str) -> str:
    """A member's name as UTF-8, whatever bytes it is made of."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def oversized(where: str, limit: int) -> Problem:
    """The problem of a member or file that is longer than it may be."""
    return Problem(kind=SampleProblemKind.OVERSIZED_MEMBER, where=where, detail=f"longer than {limit} bytes")


def truncated(name: str, error: tarfile.TarError, num_bytes_read: int) -> TruncatedArchive:
    """The problem of a tar that cannot be read further."""
    return TruncatedArchive(
        kind=SampleProblemKind.TRUNCATED_ARCHIVE,
        where=name,
        detail=f"corrupt tar: {error}",
        num_bytes_read=num_bytes_read,
    )
