"""Assemble a manifest from the indexes of all archives (`pipelines.images.index`).

The archives are handled in order, so that the result does not depend on how many were indexed at the same time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from pipelines.images.caption_files import CaptionFile
from pipelines.images.manifest import CaptionReading, ImageManifest, ImageShard, open_index
from pipelines.images.samples import TAR_BLOCK_BYTES, SampleProblemKind
from pipelines.losses import Losses, losses_name
from pipelines.problems import Problem
from pipelines.storage import resolve

ASSEMBLY = "assembly"
"""Base name of the file of losses that `assemble` writes (see `pipelines.losses.losses_name`)."""


def assemble(
    entries: Sequence[dict[str, Any]],
    captions: CaptionFile | None,
    *,
    directory: str,
    source: str,
    captions_uri: str,
    max_pixels: int,
) -> ImageManifest:
    """Combine the indexes of all archives into a manifest.

    If several images have the same key, the first one is kept, in the order of archives and within each archive;
    every other one is counted as a problem. An image that the caption file names but no archive holds is a problem
    too. The number of samples after the place where a tar becomes unreadable is estimated; with a caption file no
    estimate is needed, because the file names every image.

    Args:
        entries: results of `index_archive`, in the order of the archives.
        captions: captions by image path, or None if captions are stored with the images.
        directory: URI of the directory that holds the index files.
        source: path or URI that the archives were listed from.
        captions_uri: path or URI of the caption file, for the manifest.
        max_pixels: limit that the images were checked against, for the manifest.
    """
    lost = {key for entry in entries for key in entry["lost"]}
    fields = set(ImageShard.__dataclass_fields__)
    shards = [ImageShard(**{name: value for name, value in entry.items() if name in fields}) for entry in entries]
    with Losses(losses_name(f"{directory}/{ASSEMBLY}")) as losses:
        if captions is None:
            shards = _add_unread(shards, [entry["num_bytes_read"] for entry in entries], losses)
        tables = [_list_images(open_index(directory, shard.file)) for shard in shards]
        is_first, distinct = _find_first_occurrences(pa.concat_tables(tables).column("key"))
        bounds = np.cumsum([0, *(table.num_rows for table in tables)])
        distinct_shards = [
            _drop_repeated(shard, table, np.flatnonzero(~is_first[start:stop]), losses)
            for shard, table, start, stop in zip(shards, tables, bounds[:-1], bounds[1:], strict=True)
        ]
        reading = None
        if captions is not None:
            reading = _count_absent(captions, captions_uri, lost.union(distinct.to_pylist()), losses)
    return ImageManifest(
        directory=directory,
        source=source if "://" in source else resolve(source)[1],
        max_pixels=max_pixels,
        shards=distinct_shards,
        captions=reading,
    )


def _add_unread(shards: Sequence[ImageShard], num_bytes_read: Sequence[int | None], losses: Losses) -> list[ImageShard]:
    """Add to each unreadable shard an estimate, from bytes, of the number of samples that could not be reached.

    If a tar is corrupt before its end, the number of remaining bytes is known. If it ends early, the missing bytes
    are estimated as the difference to the median size of the intact tars. If there are no intact tars, as many bytes
    are assumed to be missing as were read, which is what a cut at a random place costs on average.

    Args:
        shards: the shards in order.
        num_bytes_read: for each shard, how many bytes of a truncated or corrupt tar could be read, else None.
        losses: file of losses that receives the estimates.
    """
    intact = [
        shard
        for shard, read in zip(shards, num_bytes_read, strict=True)
        if read is None and shard.num_images and shard.num_bytes
    ]
    median = float(np.median([shard.num_bytes for shard in intact])) if intact else 0.0
    images_per_byte = sum(shard.num_images for shard in intact) / median / len(intact) if intact else 0.0
    estimated = []
    for shard, read in zip(shards, num_bytes_read, strict=True):
        if read is None:
            estimated.append(shard)
            continue
        num_bytes = shard.num_bytes or 0  # Some filesystems do not report sizes.
        if read + TAR_BLOCK_BYTES <= num_bytes:
            missing, basis = num_bytes - read, f"the tar's {num_bytes} bytes"
        elif intact:
            missing, basis = max(0, round(median) - read), f"the {median:.0f} bytes of a whole tar"
        else:
            missing, basis = read, "nothing, as its whole size is unknown: as many as could be read"
        num_unread = round(missing * (shard.num_images / read if shard.num_images else images_per_byte))
        estimated.append(
            _add_problems(shard, SampleProblemKind.UNREAD_SAMPLE, num_unread, f"estimated from {basis}", losses)
        )
    return estimated


def _add_problems(shard: ImageShard, kind: SampleProblemKind, number: int, detail: str, losses: Losses) -> ImageShard:
    """Return the shard with `number` more problems of a kind, recorded as one problem of the whole archive."""
    if number == 0:
        return shard
    problems, examples = Counter(shard.problems), list(shard.examples)
    name = shard.archive.rsplit("/", 1)[-1]
    problem = Problem(kind=kind, where=name, detail=f"about {number} samples, {detail}", count=number)
    losses.add(shard.archive, problem, problems, examples)
    return replace(shard, problems=dict(problems), examples=examples)


def _list_images(table: pa.Table) -> pa.Table:
    """Return a table with one row per image: its key and its number of pairs."""
    _, first, counts = np.unique(table.column("image").to_numpy(), return_index=True, return_counts=True)
    return pa.table({"key": table.column("key").take(pa.array(first, pa.int64())), "num_pairs": counts})


def _find_first_occurrences(keys: pa.ChunkedArray) -> tuple[np.ndarray, pa.Array]:
    """Return (n,) bool, whether each key occurs for the first time, and the distinct keys."""
    encoded = pa.array(keys.combine_chunks(), pa.string()).dictionary_encode()
    codes = encoded.indices.to_numpy()  # Codes are numbered in order of first occurrence.
    return codes > np.maximum.accumulate(np.concatenate([[-1], codes]))[:-1], encoded.dictionary


def _drop_repeated(shard: ImageShard, images: pa.Table, repeated: np.ndarray, losses: Losses) -> ImageShard:
    """Remove images with repeated keys from a shard and count them as problems.

    Args:
        shard: the shard to change.
        images: its images, as from `_list_images`.
        repeated: row numbers in `images` of those whose key occurred before.
        losses: file of losses that receives the removed images.
    """
    problems, examples = Counter(shard.problems), list(shard.examples)
    for key in images.column("key").take(pa.array(repeated, pa.int64())).to_pylist():
        where = f"{shard.archive.rsplit('/', 1)[-1]}/{key}"
        detail = "the key has occurred before; the first in the order of archives stays"
        problem = Problem(kind=SampleProblemKind.DUPLICATED_KEY, where=where, detail=detail)
        losses.add(shard.archive, problem, problems, examples)
    return replace(
        shard,
        num_pairs=shard.num_pairs - int(images.column("num_pairs").to_numpy()[repeated].sum()),
        num_images=shard.num_images - len(repeated),
        problems=dict(problems),
        examples=examples,
        dropped=repeated.tolist(),
    )


def _count_absent(captions: CaptionFile, uri: str, present: set[str], losses: Losses) -> CaptionReading:
    """Count as problems all images that the caption file names but that are not in `present`."""
    problems: Counter[str] = Counter()
    examples: list[str] = []
    for name in captions.captions:
        if name not in present:
            detail = "named in the captions, but no archive holds it"
            problem = Problem(kind=SampleProblemKind.ABSENT_IMAGE, where=name, detail=detail)
            losses.add(uri, problem, problems, examples)
    return CaptionReading(path=uri, problems=dict(problems), examples=examples)
