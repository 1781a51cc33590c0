"""Preparing image–text data: a Ray Data job that indexes archives and checks every image, one task an archive.

Images stay where they are. The directory is named after everything that decides its content, so preparing again is free,
and an interrupted preparation goes on with the archives that are left.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections import Counter
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from pipelines.archive_tasks import run_archive_tasks
from pipelines.archives import resolve
from pipelines.caption_files import CaptionFile
from pipelines.image_archives import (
    ImageArchive,
    ImageSample,
    SampleProblemKind,
    list_image_archives,
    read_samples,
)
from pipelines.image_decoding import LARGEST_MAX_PIXELS, MAX_PIXELS, ImageError, check_image
from pipelines.image_manifest import (
    FORMAT_VERSION,
    INDEX_SCHEMA,
    CaptionReading,
    ImageManifest,
    ImageShard,
    open_index,
)
from pipelines.problems import Problem, check_problems, note


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareImagesConfig:
    """What to prepare and how."""

    source: str
    """A WebDataset tar as img2dataset writes it, a directory of such, or a directory of images; path or pyarrow URI."""
    captions: str = ""
    """A json with the captions, for images that come without: Karpathy's form, or a list of {"image", "caption"}."""
    split: str = ""
    """Which split of a Karpathy json."""
    max_bad_share: float = 0.01
    """Share of samples that may be unreadable before preparing fails."""
    max_pixels: int = MAX_PIXELS
    """Larger images are refused, before decoding, as decompression bombs."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.max_bad_share <= 1.0:
            raise ValueError(f"max_bad_share = {self.max_bad_share:g} must lie in [0, 1]")
        if not 1 <= self.max_pixels <= LARGEST_MAX_PIXELS:
            raise ValueError(f"max_pixels = {self.max_pixels} must lie in 1 … {LARGEST_MAX_PIXELS}")
        if self.split and not self.captions:
            raise ValueError(f"split = {self.split!r} selects from captions, which is empty: give a Karpathy json")


def prepare_images(
    config: PrepareImagesConfig, root: str, *, max_bad_share_field: str = "data.max_bad_share"
) -> ImageManifest:
    """Prepare `config.source` under the directory `root` (path or URI), or return what is already there.

    Needs a running Ray.

    Args:
        max_bad_share_field: how the person who gave it knows it, for the message.

    Raises:
        FileNotFoundError, ValueError: as `check_source`.
        TooManyProblemsError: naming the share, the kinds and the archives.
    """
    archives, captions = check_source(config)
    directory = f"{root}/{_content_name(config, archives, captions)}"
    try:
        manifest = ImageManifest.load(directory)
    except FileNotFoundError:
        filesystem, path = resolve(directory)
        filesystem.create_dir(path, recursive=True)

        def prepare(number: int) -> dict[str, Any]:
            return _prepare_archive(config, archives[number], number, directory)

        entries = run_archive_tasks(prepare, len(archives), directory)
        manifest = _assemble(config, entries, captions, directory)
        manifest.save()
    check_problems(config.source, manifest.readings, config.max_bad_share, field=max_bad_share_field, noun="pair")
    return manifest


def check_source(config: PrepareImagesConfig) -> tuple[list[ImageArchive], CaptionFile | None]:
    """What there is to prepare; needs no Ray.

    Raises:
        FileNotFoundError: the source or the captions do not exist, or the source holds neither tar nor image.
        ValueError: the captions are not understood, or needed and not given.
    """
    archives = list_image_archives(config.source)
    captions = CaptionFile.load(config.captions, config.split) if config.captions else None
    if captions is None and any(archive.files for archive in archives):
        raise ValueError(f"source = {config.source!r} holds images in files of their own: captions must name a json")
    return archives, captions


def _content_name(config: PrepareImagesConfig, archives: list[ImageArchive], captions: CaptionFile | None) -> str:
    """A directory name that is a function of everything that decides the prepared content."""
    files = [asdict(archive) for archive in archives]
    content = json.dumps([FORMAT_VERSION, files, captions and captions.captions, config.max_pixels])
    digest = hashlib.blake2b(content.encode(), digest_size=6).hexdigest()
    name = config.source.rstrip("/").rsplit("/", 1)[-1].split(".")[0]
    return f"{name}-pairs-{digest}"


def _prepare_archive(config: PrepareImagesConfig, archive: ImageArchive, number: int, directory: str) -> dict[str, Any]:
    """Read one archive, decode each of its images once, and write its index; its ImageShard, with `lost` keys, as JSON."""
    captions = CaptionFile.load(config.captions, config.split) if config.captions else None
    problems: Counter[str] = Counter()
    examples: list[str] = []
    columns: dict[str, list[Any]] = {name: [] for name in INDEX_SCHEMA.names}
    lost: list[str] = []
    num_images = 0
    digest = hashlib.blake2b(digest_size=8)
    for item in read_samples(config.source, archive, captions):
        if isinstance(item, Problem):
            note(item, problems, examples)
            continue
        problem = _image_problem(config, archive, item)
        if problem:
            note(problem, problems, examples)
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
    file = f"index-{number:05d}.arrow"
    filesystem, path = resolve(f"{directory}/{file}")
    with filesystem.open_output_stream(path) as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    shard = ImageShard(
        file=file,
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


def _image_problem(config: PrepareImagesConfig, archive: ImageArchive, sample: ImageSample) -> Problem | None:
    try:
        check_image(sample.data, config.max_pixels)
    except ImageError as error:
        where = sample.member if archive.files else f"{archive.path.rsplit('/', 1)[-1]}/{sample.member}"
        return Problem(kind=error.kind, where=where, detail=str(error))
    return None


# ---- over all archives -----------------------------------------------------------------------------------------------


def _assemble(
    config: PrepareImagesConfig, entries: list[dict[str, Any]], captions: CaptionFile | None, directory: str
) -> ImageManifest:
    """The manifest: of images with one key the first in archive order stays; named ones that are nowhere are counted."""
    lost = {key for entry in entries for key in entry["lost"]}
    shards = [ImageShard(**{name: value for name, value in entry.items() if name != "lost"}) for entry in entries]
    tables = [_image_rows(open_index(directory, shard.file)) for shard in shards]
    keys = pa.chunked_array([table.column("key").combine_chunks() for table in tables], pa.string())
    is_first, distinct = _first_occurrences(keys)
    bounds = np.cumsum([0, *(table.num_rows for table in tables)])
    shards = [
        _without(shard, table, np.flatnonzero(~is_first[start:stop]))
        for shard, table, start, stop in zip(shards, tables, bounds, bounds[1:], strict=False)
    ]
    reading = None
    if captions is not None:
        found = lost.union(distinct.to_pylist())
        problems: Counter[str] = Counter()
        examples: list[str] = []
        for name in captions.captions:
            if name not in found:
                detail = "named in the captions, but no archive holds it"
                note(Problem(kind=SampleProblemKind.ABSENT_IMAGE, where=name, detail=detail), problems, examples)
        reading = CaptionReading(path=config.captions, problems=dict(problems), examples=examples)
    return ImageManifest(
        directory=directory,
        source=absolute(config.source),
        max_pixels=config.max_pixels,
        shards=shards,
        captions=reading,
    )


def absolute(uri: str) -> str:
    """A local path from the root, so that it can be read from another working directory; a URI as it is."""
    return uri if "://" in uri else resolve(uri)[1]


def _image_rows(table: pa.Table) -> pa.Table:
    """One row an image: its key and the number of its pairs."""
    _, first, counts = np.unique(table.column("image").to_numpy(), return_index=True, return_counts=True)
    return pa.table({"key": table.column("key").take(pa.array(first)), "num_pairs": counts})


def _first_occurrences(keys: pa.ChunkedArray) -> tuple[np.ndarray, pa.Array]:
    """Where a key occurs for the first time, and the distinct keys."""
    if not len(keys):
        return np.empty(0, dtype=bool), pa.array([], pa.string())
    encoded = keys.combine_chunks().dictionary_encode()
    codes = encoded.indices.to_numpy()  # numbered in order of first occurrence
    before = np.maximum.accumulate(np.concatenate([[-1], codes[:-1]]))
    return codes > before, encoded.dictionary


def _without(shard: ImageShard, table: pa.Table, repeated: np.ndarray) -> ImageShard:
    """The shard without the images whose keys have occurred before, which become problems."""
    if not len(repeated):
        return shard
    problems, examples = Counter(shard.problems), list(shard.examples)
    for key in table.column("key").take(pa.array(repeated)).to_pylist():
        where = f"{shard.archive.rsplit('/', 1)[-1]}/{key}"
        detail = "the key has occurred before; the first in the order of archives stays"
        note(Problem(kind=SampleProblemKind.DUPLICATED_KEY, where=where, detail=detail), problems, examples)
    return replace(
        shard,
        num_pairs=shard.num_pairs - int(table.column("num_pairs").to_numpy()[repeated].sum()),
        num_images=shard.num_images - len(repeated),
        problems=dict(problems),
        examples=examples,
        dropped=repeated.tolist(),
    )


def describe(manifest: ImageManifest, seconds: float | None = None) -> str:
    """Counts of a prepared data set, for a person."""
    lost = ", ".join(f"{number} {kind}" for kind, number in sorted(manifest.problems.items())) or "none"
    took = "" if seconds is None else f" in {seconds:.0f} s"
    return (
        f"{manifest.num_pairs} pairs of {manifest.num_images} images ({len(manifest.shards)} shards, digest "
        f"{manifest.digest}){took}; unreadable: {lost}"
    )
