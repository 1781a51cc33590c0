"""Indexing: an archive becomes a table of its good pairs, and the tables of all archives become a manifest.

The first half looks at one archive, so that many can be indexed at once; the second at all of them in their order, so that
the result does not depend on how many were.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pyarrow as pa

from pipelines.archives import relative, resolve
from pipelines.caption_files import CaptionFile
from pipelines.image_archives import ImageArchive, SampleProblemKind, read_samples
from pipelines.image_decoding import ImageError, check_image
from pipelines.image_manifest import INDEX_SCHEMA, CaptionReading, ImageManifest, ImageShard, open_index
from pipelines.problems import Problem, note


def index_name(number: int) -> str:
    """The file name of an archive's index."""
    return f"index-{number:05d}.arrow"


def index_archive(
    source: str, archive: ImageArchive, captions: CaptionFile | None, *, max_pixels: int, index: str
) -> dict[str, Any]:
    """Read one archive, decode each of its images once, and write the index of what is good.

    Args:
        source: the URI that the archive was listed from.
        index: URI of the file to write.

    Returns:
        The archive's ImageShard as JSON, and `lost`, the keys of its bad images.
    """
    problems: Counter[str] = Counter()
    examples: list[str] = []
    columns: dict[str, list[Any]] = {name: [] for name in INDEX_SCHEMA.names}
    lost: list[str] = []
    num_images = 0
    digest = hashlib.blake2b(digest_size=8)
    name = relative(archive.path, resolve(source)[1])
    for item in read_samples(source, archive, captions):
        if isinstance(item, Problem):
            note(item, problems, examples)
            continue
        try:
            check_image(item.data, max_pixels)
        except ImageError as error:
            where = item.member if archive.files else f"{name}/{item.member}"
            note(Problem(kind=error.kind, where=where, detail=str(error)), problems, examples)
            lost.append(item.key)
            continue
        for caption in item.captions:
            row = (item.key, num_images, caption, item.offset, len(item.data), item.member, zlib.crc32(item.data))
            for column, value in zip(columns.values(), row, strict=True):
                column.append(value)
        digest.update(json.dumps([item.key, item.captions, len(item.data)]).encode())
        digest.update(item.data)
        num_images += 1

    table = pa.table(columns, schema=INDEX_SCHEMA)
    filesystem, path = resolve(index)
    with filesystem.open_output_stream(path) as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    shard = ImageShard(
        file=index.rsplit("/", 1)[-1],
        archive=archive.path,
        is_directory=bool(archive.files),
        num_bytes=archive.num_bytes,
        num_pairs=table.num_rows,
        num_images=num_images,
        digest=digest.hexdigest(),
        problems=dict(problems),
        examples=examples,
        dropped=[],
    )
    return asdict(shard) | {"lost": lost}


def assemble(
    entries: Sequence[dict[str, Any]],
    captions: CaptionFile | None,
    *,
    directory: str,
    source: str,
    captions_uri: str,
    max_pixels: int,
) -> ImageManifest:
    """The manifest of indexed archives, given in order.

    Of images with one key the first stays, in the order of archives and in each archive; every other is a problem. So is
    an image that the captions name and no archive holds.
    """
    lost = {key for entry in entries for key in entry["lost"]}
    shards = [ImageShard(**{name: value for name, value in entry.items() if name != "lost"}) for entry in entries]
    tables = [_image_rows(open_index(directory, shard.file)) for shard in shards]
    is_first, distinct = _first_occurrences(pa.concat_tables(tables).column("key"))
    bounds = np.cumsum([0, *(table.num_rows for table in tables)])
    kept = [
        _without(shard, table, np.flatnonzero(~is_first[start:stop]))
        for shard, table, start, stop in zip(shards, tables, bounds[:-1], bounds[1:], strict=True)
    ]
    return ImageManifest(
        directory=directory,
        source=source if "://" in source else resolve(source)[1],
        max_pixels=max_pixels,
        shards=kept,
        captions=None if captions is None else _absent(captions, captions_uri, lost.union(distinct.to_pylist())),
    )


def _image_rows(table: pa.Table) -> pa.Table:
    """One row an image: its key and the number of its pairs."""
    _, first, counts = np.unique(table.column("image").to_numpy(), return_index=True, return_counts=True)
    return pa.table({"key": table.column("key").take(pa.array(first, pa.int64())), "num_pairs": counts})


def _first_occurrences(keys: pa.ChunkedArray) -> tuple[np.ndarray, pa.Array]:
    """(n,) whether a key occurs for the first time, and the distinct keys."""
    encoded = pa.array(keys.combine_chunks(), pa.string()).dictionary_encode()
    codes = encoded.indices.to_numpy()  # numbered in order of first occurrence
    return codes > np.maximum.accumulate(np.concatenate([[-1], codes]))[:-1], encoded.dictionary


def _without(shard: ImageShard, images: pa.Table, repeated: np.ndarray) -> ImageShard:
    """The shard without images whose keys have occurred before, which become problems."""
    problems, examples = Counter(shard.problems), list(shard.examples)
    for key in images.column("key").take(pa.array(repeated, pa.int64())).to_pylist():
        where = f"{shard.archive.rsplit('/', 1)[-1]}/{key}"
        detail = "the key has occurred before; the first in the order of archives stays"
        note(Problem(kind=SampleProblemKind.DUPLICATED_KEY, where=where, detail=detail), problems, examples)
    return replace(
        shard,
        num_pairs=shard.num_pairs - int(images.column("num_pairs").to_numpy()[repeated].sum()),
        num_images=shard.num_images - len(repeated),
        problems=dict(problems),
        examples=examples,
        dropped=repeated.tolist(),
    )


def _absent(captions: CaptionFile, uri: str, found: set[str]) -> CaptionReading:
    """The images that the captions name and that are not among those found."""
    problems: Counter[str] = Counter()
    examples: list[str] = []
    for name in captions.captions:
        if name not in found:
            detail = "named in the captions, but no archive holds it"
            note(Problem(kind=SampleProblemKind.ABSENT_IMAGE, where=name, detail=detail), problems, examples)
    return CaptionReading(path=uri, problems=dict(problems), examples=examples)
