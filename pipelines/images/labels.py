"""Read numbers that stand beside images: a field of the JSON file of every sample."""

from __future__ import annotations

import json
import math
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TypeGuard

from pipelines.archives import resolve_source
from pipelines.images.archives import MAX_CAPTION_BYTES, ImageArchive, make_printable
from pipelines.object_store import open_for_reading
from pipelines.storage import relative
from pipelines.tars import tar_members

_SUFFIX = ".json"


def read_numbers(uri: str, archives: Sequence[ImageArchive], field: str) -> Iterator[tuple[str, float]]:
    """Yield key and number of every sample whose JSON file has a finite number in a field, in stored order.

    Samples without one are left out, and so is what follows the place where a tar is damaged. As archives may have the same
    keys, those of every archive but the first are yielded with the archive's name before them
    (`pipelines.images.manifest.ImageShard.key_prefix`), and without it where no archive before has them.

    Args:
        uri: the URI that `archives` were listed from.
        archives: tars of WebDataset samples; groups of image files have no JSON files.
        field: name of the field.

    Raises:
        ValueError: at the end, if no sample has a number in this field; the message names fields of a sample that have one.
        OSError: if an archive cannot be opened.
    """
    filesystem, root = resolve_source(uri)
    is_found = False
    seen: set[str] = set()
    others: set[str] = set()
    for archive in archives:
        if archive.files:
            continue
        with open_for_reading(filesystem, archive.path) as stream, suppress(tarfile.TarError):
            for info, member in tar_members(stream):
                name = make_printable(info.name)
                if not name.lower().endswith(_SUFFIX) or not info.isreg() or info.size > MAX_CAPTION_BYTES:
                    continue
                record = _parse(member.read(info.size))
                if _is_number(value := record.get(field)):
                    is_found = True
                    key = name[: -len(_SUFFIX)]
                    if key not in seen:
                        seen.add(key)
                        yield key, float(value)
                    if archive is not archives[0]:
                        yield f"{relative(archive.path, root)}/{key}", float(value)
                elif not others:
                    others = {key for key, value in record.items() if _is_number(value)}
    if not is_found:
        raise ValueError(
            f"label = {field}: no .json in {uri} has a number in this field"
            + (f"; fields with numbers are {', '.join(sorted(others))}" if others else "")
        )


def _parse(data: bytes) -> dict[str, object]:
    with suppress(ValueError, RecursionError):
        if isinstance(record := json.loads(data), dict):
            return record
    return {}


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
