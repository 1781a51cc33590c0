"""Samples of image–text archives: what they consist of, how their bytes are read, and what can be wrong with them."""

from __future__ import annotations

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
"""The members of a tar: headers and readers, as from `pipelines.tars.tar_members`."""


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


def member_end(info: tarfile.TarInfo) -> int:
    """Return the position in the tar at which a member's data end, including padding."""
    return info.offset_data + -(-info.size // TAR_BLOCK_BYTES) * TAR_BLOCK_BYTES


def read_part(info: tarfile.TarInfo, member: TarMember, name: str) -> Part:
    """Read a member's bytes, or explain in `problem` why they cannot be used.

    Args:
        info: header of the member.
        member: reader of the member's bytes.
        name: name of the tar, for messages.

    Raises:
        tarfile.TarError: if the archive ends before the member does.
    """
    member_name = make_printable(info.name)
    where = f"{name}/{member_name}"
    limit = MAX_CAPTION_BYTES if member_name.lower().endswith(("txt", "json")) else MAX_IMAGE_BYTES
    data, problem = b"", None
    if info.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or info.sparse is not None:
        detail = "a link, a sparse file or a device, not a plain file"
        problem = Problem(kind=SampleProblemKind.IRREGULAR_MEMBER, where=where, detail=detail)
    elif info.size > limit:
        problem = report_oversized(where, limit)
    else:
        data = member.read(info.size)
        if len(data) < info.size:
            raise tarfile.ReadError(f"it ends within {member_name}")
    return Part(member=member_name, offset=info.offset_data, data=data, problem=problem)


def check_captions(
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


def make_printable(name: str) -> str:
    """Return a member's name as a string that can be encoded as UTF-8, whatever its bytes are."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def report_oversized(where: str, limit: int) -> Problem:
    """Return the problem of a member or file that is longer than `limit` bytes."""
    return Problem(kind=SampleProblemKind.OVERSIZED_MEMBER, where=where, detail=f"longer than {limit} bytes")


def report_truncated(name: str, error: tarfile.TarError, num_bytes_read: int) -> TruncatedArchive:
    """Return the problem of a tar that cannot be read further after `num_bytes_read` bytes."""
    return TruncatedArchive(
        kind=SampleProblemKind.TRUNCATED_ARCHIVE,
        where=name,
        detail=f"corrupt tar: {error}",
        num_bytes_read=num_bytes_read,
    )
