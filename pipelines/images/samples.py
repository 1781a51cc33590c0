"""Group the members of a tar into image–text samples, and report what is wrong with them.

A sample is an image and its captions, stored as consecutive members with the same key, such as `photo.v1.2.jpg` and
`photo.v1.2.txt`. The key of a member is its name up to the last dot. (WebDataset splits at the first dot, which would
recognise these two members neither as an image nor as a text; for names with one dot the two rules agree.) A member
with a longer name beside a sample, such as `photo.seg.png` beside `photo.jpg` and `photo.txt`, is left out and
counted if it has no partner of its own.
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
"""Maximum size of an image file in bytes; a reader holds several files at its peak, and one decoded image."""
MAX_CAPTION_BYTES = 2**22

IMAGE_SUFFIXES = ("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff")

TAR_BLOCK_BYTES = 512


class SampleProblemKind(StrEnum):
    """Kinds of problems with a sample, apart from problems with its image's bytes (`ImageProblemKind`)."""

    TRUNCATED_ARCHIVE = "truncated_archive"
    """The tar ends early or cannot be read further; the complete samples before that place were yielded."""
    UNREAD_SAMPLE = "unread_sample"
    """The sample lies after the place where a tar becomes unreadable; their number is estimated from bytes."""
    EMPTY_ARCHIVE = "empty_archive"
    MISSING_IMAGE = "missing_image"
    MISSING_CAPTION = "missing_caption"
    EMPTY_CAPTION = "empty_caption"
    INVALID_UTF8 = "invalid_utf8"
    OVERSIZED_MEMBER = "oversized_member"
    IRREGULAR_MEMBER = "irregular_member"
    """The member is a link, a sparse file or a device, although its name is that of an image or a caption."""
    UNREADABLE_FILE = "unreadable_file"
    """The image file was listed but cannot be opened: it was deleted, is a broken link, or is not permitted."""
    DUPLICATED_KEY = "duplicated_key"
    ABSENT_IMAGE = "absent_image"
    """The JSON file of captions names the image, but no archive holds it."""


Members = Iterator[tuple[tarfile.TarInfo, TarMember]]


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageSample:
    """Image, not yet decoded or checked, with at least one caption."""

    key: str
    """Name of the member up to its last dot, or the image's path in the JSON file if captions come from one."""
    member: str
    """Name of the image in the tar, or its path relative to the directory."""
    offset: int
    """Position of the image's first byte in the tar, or 0 for an image in a file of its own."""
    data: bytes
    """Encoded bytes of the image file."""
    captions: tuple[str, ...]
    """Captions of the image, none of them empty."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LeftOut:
    """Member or file that belongs to no sample but is no problem either; such members are counted."""

    kind: str
    """Suffix of the name, or the reason why it is left out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TruncatedArchive(Problem):
    """Problem of a tar that cannot be read further."""

    num_bytes_read: int
    """Position in the tar at which the last member with a readable header ends, or should end."""


Item = ImageSample | Problem | LeftOut


# ---- grouping --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One member of a sample."""

    member: str
    """Name of the member."""
    offset: int
    """Position of its first byte in the tar."""
    data: bytes
    """Its bytes; empty if there is a problem."""
    problem: Problem | None
    """Why the bytes could not be read, or None."""


Parts = dict[str, Part]  # The keys are roles: "image", "txt" or "json".


class _Group:
    """Collects the samples that share a WebDataset key, that is, all members whose names agree up to the first dot.

    At most two samples are held in memory: the one whose members are being read, and the pending one with the
    shortest key that is a prefix of the former's key.
    """

    def __init__(self, key: str, archive: str) -> None:
        self.key = key
        self._archive = archive
        self._pending: dict[str, Parts] = {}
        self._last = ""
        self._seen: set[str] = set()
        # Members that lack an image or a caption. Only at the end of the group is it known whether they belong beside a
        # complete sample and are left out, or are problems.
        self._without_partner: list[tuple[str, str, Problem]] = []

    def add(self, key: str, role: str, part: Part) -> Iterator[Item]:
        """Add a member, and yield the samples that are complete because no later member can belong to them."""
        base = min((other for other in self._pending if key.startswith(other + ".")), key=len, default=key)
        for other in [other for other in self._pending if other not in (key, base)]:
            yield from self._close(other)
        if role in self._pending.get(key, {}):
            yield from self._close(key)
        self._last = key
        self._seen.add(key)
        self._pending.setdefault(key, {})[role] = part

    def close(self, *, is_cut: bool = False) -> Iterator[Item]:
        """Yield everything that is left.

        If the tar was cut off (`is_cut`), an incomplete last sample is not reported, as it belongs to the missing part.
        """
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
    """Yield the samples of a tar in the order in which they become complete, and its problems and left-out members.

    Args:
        members: the members of the tar, as from `tar_members`.
        name: name of the tar, for messages.
    """
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
    """Return the position in the tar at which a member's data end, including padding."""
    return info.offset_data + -(-info.size // TAR_BLOCK_BYTES) * TAR_BLOCK_BYTES


def _key_and_suffix(name: str) -> tuple[str, str]:
    """Split a name at its last dot: `a/b.v1.PNG` gives `a/b.v1` and `png`; a hidden file has no suffix."""
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
        except (ValueError, RecursionError):  # Bytes that are not UTF-8 raise a ValueError too.
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
    """Read a member's bytes, or explain in `problem` why they cannot be used.

    Args:
        info: header of the member.
        member: reader of the member's bytes.
        name: name of the tar, for messages.

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
    """Yield a problem for each caption that is empty or invalid, then the sample with the remaining captions, if any.

    Args:
        key, member, offset, data: fields of the `ImageSample`.
        texts: the captions to check.
        where: location of the sample, for messages.
    """
    captions = []
    for text in texts:
        stripped = text.strip()
        if not stripped:
            yield Problem(kind=SampleProblemKind.EMPTY_CAPTION, where=where, detail="empty, or only whitespace")
            continue
        try:
            stripped.encode()
        except UnicodeEncodeError as error:  # JSON can encode half of a surrogate pair, which no tokenizer accepts.
            yield Problem(kind=SampleProblemKind.INVALID_UTF8, where=where, detail=str(error))
            continue
        captions.append(stripped)
    if captions:
        yield ImageSample(key=key, member=member, offset=offset, data=data, captions=tuple(captions))


def printable(name: str) -> str:
    """Return a member's name as a string that can be encoded as UTF-8, whatever its bytes are."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def oversized(where: str, limit: int) -> Problem:
    """Return the problem of a member or file that is longer than `limit` bytes."""
    return Problem(kind=SampleProblemKind.OVERSIZED_MEMBER, where=where, detail=f"longer than {limit} bytes")


def truncated(name: str, error: tarfile.TarError, num_bytes_read: int) -> TruncatedArchive:
    """Return the problem of a tar that cannot be read further after `num_bytes_read` bytes."""
    return TruncatedArchive(
        kind=SampleProblemKind.TRUNCATED_ARCHIVE,
        where=name,
        detail=f"corrupt tar: {error}",
        num_bytes_read=num_bytes_read,
    )
