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

from pipelines.images.samples import (
    IMAGE_SUFFIXES,
    ImageSample,
    Item,
    LeftOut,
    Members,
    Part,
    SampleProblemKind,
    check_captions,
    make_printable,
    member_end,
    read_part,
    report_truncated,
)
from pipelines.problems import Problem

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
        texts = _read_captions(parts, where) if "image" in parts else _report_missing_image(parts, where)
        if problem:
            yield problem
        elif not isinstance(texts, Problem):
            image = parts["image"]
            yield from check_captions(key, image.member, image.offset, image.data, texts, where)
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
            key, suffix = _split_name(info.name)
            role = _role_of(suffix)
            if role is None:
                yield LeftOut(kind=f".{suffix}" if suffix else "no suffix")
                continue
            if (group_key := _cut_at_first_dot(key)) != group.key:
                yield from group.close()
                group = _Group(group_key, name)
            yield from group.add(key, role, read_part(info, member, name))
    except tarfile.TarError as error:
        yield from group.close(is_cut=True)
        yield report_truncated(name, error, end)
    else:
        yield from group.close()


def group_of(info: tarfile.TarInfo) -> str | None:
    """Return the WebDataset key of a member (its name up to the first dot); None if it can belong to no sample."""
    if info.isdir():
        return None
    key, suffix = _split_name(info.name)
    return None if _role_of(suffix) is None else _cut_at_first_dot(key)


def _role_of(suffix: str) -> str | None:
    """Return what a member with this suffix is in a sample: "image", "txt", "json", or None for nothing."""
    role = "image" if suffix in IMAGE_SUFFIXES else suffix
    return role if role in ("image", "txt", "json") else None


def _split_name(name: str) -> tuple[str, str]:
    """Split a name at its last dot: `a/b.v1.PNG` gives `a/b.v1` and `png`; a hidden file has no suffix."""
    directory, slash, file = make_printable(name).rpartition("/")
    stem, _, suffix = file.rpartition(".")
    is_hidden = file.startswith(".")
    return directory + slash + stem, "" if is_hidden or not stem else suffix.lower()


def _cut_at_first_dot(key: str) -> str:
    directory, slash, file = key.rpartition("/")
    return directory + slash + file.partition(".")[0]


def _report_missing_image(parts: Parts, where: str) -> Problem:
    detail = f"there is only {', '.join(part.member for part in parts.values())}"
    return Problem(kind=SampleProblemKind.MISSING_IMAGE, where=where, detail=detail)


def _read_captions(parts: Parts, where: str) -> Sequence[str] | Problem:
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
            return [parts["txt"].data.decode("utf-8-sig")]
        except UnicodeDecodeError as error:
            return Problem(kind=SampleProblemKind.INVALID_UTF8, where=where, detail=str(error))
    if isinstance(caption, str):
        return [caption]
    detail = "no .txt" + (', and no field "caption" in the .json' if "json" in parts else " and no .json")
    return Problem(kind=SampleProblemKind.MISSING_CAPTION, where=where, detail=detail)
