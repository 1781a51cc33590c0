"""Index an archive: build a table of its usable pairs.

This module handles one archive, or a part of it, so that many can be indexed in parallel. `pipelines.images.assembly`
combines their tables into a manifest.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import pyarrow as pa

from pipelines.images.archives import ImageArchive, read_samples
from pipelines.images.caption_files import CaptionFile
from pipelines.images.decoding import ImageError, check_image
from pipelines.images.manifest import INDEX_SCHEMA, ImageShard
from pipelines.images.samples import ImageSample, LeftOut, TruncatedArchive
from pipelines.losses import Losses, losses_name
from pipelines.parts import WHOLE, Part
from pipelines.problems import Problem
from pipelines.storage import relative, resolve

OTHER_KINDS = "other"
"""Kind under which the remaining left-out members are counted, once there are too many kinds."""

# Maximum number of distinct kinds of left-out members that are counted separately. A kind is a file suffix, so
# without a limit a malicious tar could have as many kinds as members.
_NUM_KINDS_LEFT_OUT = 32


def index_name(number: int) -> str:
    """Return the file name of the index of archive `number`."""
    return f"index-{number:05d}.arrow"


def index_archive(
    source: str,
    archive: ImageArchive,
    captions: CaptionFile | None,
    *,
    max_pixels: int,
    index: str,
    part: Part = WHOLE,
) -> dict[str, Any]:
    """Read one archive, or a part of it, decode each of its images once, and write an index of the usable pairs.

    Args:
        source: the URI that the archive was listed from.
        archive: the archive to read.
        captions: captions by image path, or None if captions are stored with the images.
        max_pixels: images with more pixels are rejected.
        index: URI of the index file to write; lost samples are written to a file beside it (`pipelines.losses`).
        part: the part of a tar to read (`pipelines.images.units`).

    Returns:
        A JSON object with the fields of the archive's (or part's) ImageShard and two more: `lost`, the keys of its unusable
        images, and `num_bytes_read`, how many bytes of a truncated or corrupt tar could be read (None for any other
        archive).
    """
    findings = _Findings()
    columns: dict[str, list[Any]] = {name: [] for name in INDEX_SCHEMA.names}
    num_images = 0
    digest = hashlib.blake2b(digest_size=8)
    with Losses(losses_name(index)) as losses:
        for sample in _read_usable(
            source, archive, captions, max_pixels=max_pixels, part=part, findings=findings, losses=losses
        ):
            checksum = zlib.crc32(sample.data)
            for caption in sample.captions:
                row = (sample.key, num_images, caption, sample.offset, len(sample.data), sample.member, checksum)
                for column, value in zip(columns.values(), row, strict=True):
                    column.append(value)
            hash_image(digest, sample.key, sample.captions, sample.data)
            num_images += 1

    table = pa.table(columns, schema=INDEX_SCHEMA)
    write_table(index, table)
    shard = ImageShard(
        file=index.rsplit("/", 1)[-1],
        archive=archive.path,
        is_directory=bool(archive.files),
        num_bytes=archive.num_bytes,
        num_pairs=table.num_rows,
        num_images=num_images,
        digest=digest.hexdigest(),
        problems=dict(findings.problems),
        examples=findings.examples,
        left_out=dict(findings.left_out),
        dropped=[],
    )
    return asdict(shard) | {"lost": findings.lost, "num_bytes_read": findings.num_bytes_read}


@dataclass(slots=True)
class _Findings:
    """What was found in an archive, or a part of it, beside its usable images."""

    problems: Counter[str] = field(default_factory=Counter)
    """Kind of problem → how often it occurred."""
    examples: list[str] = field(default_factory=list)
    """Messages of the first problems."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Kind of member that belongs to no sample → how often it occurred."""
    lost: list[str] = field(default_factory=list)
    """Keys of the images that cannot be used."""
    num_bytes_read: int | None = None
    """How many bytes of a truncated or corrupt tar could be read; None for any other archive."""


def _read_usable(
    source: str,
    archive: ImageArchive,
    captions: CaptionFile | None,
    *,
    max_pixels: int,
    part: Part,
    findings: _Findings,
    losses: Losses,
) -> Iterator[ImageSample]:
    """Yield the samples whose images can be decoded, and note everything else in `findings` and `losses`."""
    name = relative(archive.path, resolve(source)[1])
    for item in read_samples(source, archive, captions, part=part):
        if isinstance(item, LeftOut):
            count_left_out(findings.left_out, item.kind, 1)
            continue
        if isinstance(item, Problem):
            losses.add(archive.path, item, findings.problems, findings.examples)
            if isinstance(item, TruncatedArchive):
                findings.num_bytes_read = item.num_bytes_read
            continue
        try:
            check_image(item.data, max_pixels)
        except ImageError as error:
            where = item.member if archive.files else f"{name}/{item.member}"
            problem = Problem(kind=error.kind, where=where, detail=str(error))
            losses.add(archive.path, problem, findings.problems, findings.examples)
            findings.lost.append(item.key)
            continue
        yield item


def count_left_out(left_out: Counter[str], kind: str, number: int) -> None:
    """Count members that are left out by kind, and as `OTHER_KINDS` if too many kinds have occurred before."""
    left_out[kind if kind in left_out or len(left_out) < _NUM_KINDS_LEFT_OUT else OTHER_KINDS] += number


def hash_image(digest: hashlib.blake2b, key: str, captions: Sequence[str], data: bytes) -> None:
    """Add an image and its captions to the digest of a shard."""
    digest.update(json.dumps([key, captions, len(data)]).encode())
    digest.update(data)


def write_table(uri: str, table: pa.Table) -> None:
    """Write an index file."""
    filesystem, path = resolve(uri)
    with filesystem.open_output_stream(path) as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
