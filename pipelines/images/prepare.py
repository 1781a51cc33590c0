"""Prepare image–text data: index archives and check every image, with one task per archive (`pipelines.prepare`).

Images are not copied: an index has the place of every image's bytes. Archives are assembled to a manifest in order, so that
the result does not depend on how many were indexed at the same time.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from pipelines.archives import describe_not_read, resolve_source
from pipelines.images.archives import (
    FOLDER_LABEL,
    ImageArchive,
    ImageSample,
    KeyDot,
    LeftOut,
    list_image_source,
    read_samples,
)
from pipelines.images.captions import CaptionFile
from pipelines.images.decoding import LARGEST_MAX_PIXELS, MAX_PIXELS, ImageError, check_image
from pipelines.images.manifest import (
    ASSEMBLY,
    INDEX_SCHEMA,
    CaptionReading,
    ImageManifest,
    ImageShard,
    index_name,
    open_index,
)
from pipelines.object_store import unchanged
from pipelines.prepare import directory_name, prepare
from pipelines.problems import LostRecords, Problem, ProblemKind, describe_counts, estimate_unread, lost_name
from pipelines.storage import arrow_file, relative, write_bytes

# What counts as a sample, and how its key is made; prepared data are made anew under another version.
_READING_VERSION = 5

OTHER_KINDS = "other"
"""Kind under which the remaining left-out members are counted, once there are too many kinds."""

# Maximum number of distinct kinds of left-out members that are counted separately. A kind is a file suffix, so
# without a limit a malicious tar could have as many kinds as members.
_NUM_KINDS_LEFT_OUT = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareImagesConfig:
    """Which image–text data to prepare, and how."""

    source: str
    """WebDataset tar as img2dataset writes it, directory of such tars, directory of images, or pattern (`{0..3}`, `*`);
    path or pyarrow URI."""
    captions: str = ""
    """JSON file of captions, for images without their own: Karpathy's form, or a list of {"image", "caption"}."""
    splits: tuple[str, ...] = ()
    """Splits to use from a JSON file in Karpathy's form; if empty, all of them."""
    max_bad_share: float = 0.01
    """Largest share of samples that may be unreadable, in [0, 1]; above it, preparation fails."""
    max_pixels: int = MAX_PIXELS
    """Maximum number of pixels of an image; a larger one is rejected before decoding, as a decompression bomb."""
    key_dot: KeyDot = "first"
    """Dot of a member's base name at which the key of its sample ends. With webdataset, first, `a.v2.jpg` is the part
    `v2.jpg` of the sample `a`; with last it is the image of the sample `a.v2`."""
    label: str = ""
    """What takes the place of captions: folder, the last folder of an image's path; cls, the text of its .cls, as
    webdataset writes classes; or the name of a field of its .json. If empty: captions."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.max_bad_share <= 1.0:
            raise ValueError(f"max_bad_share = {self.max_bad_share:g} must lie in [0, 1]")
        if not 1 <= self.max_pixels <= LARGEST_MAX_PIXELS:
            raise ValueError(f"max_pixels = {self.max_pixels} must lie in 1 … {LARGEST_MAX_PIXELS}")
        if self.label and self.captions:
            raise ValueError(
                f"label = {self.label!r} takes the place of captions = {self.captions!r}: give one of them"
            )
        if any(self.splits) and not self.captions:
            raise ValueError(
                f"splits = {' '.join(self.splits)} selects from captions, which is empty: give a Karpathy json"
            )

    def load_captions(self) -> CaptionFile | None:
        """Return the file of captions if there is one; it is cached, so that each process reads it only once."""
        return CaptionFile.load(self.captions, self.splits) if self.captions else None


def prepare_images(config: PrepareImagesConfig, root: str, **options: Any) -> ImageManifest:
    """Prepare `config.source` in a subdirectory of `root`, or load it if it is already prepared.

    The options are `max_bad_share_field`, `losses` and `resources` of `pipelines.prepare.prepare`. Errors are those of that
    function and of :func:`check_source`.
    """
    archives, captions, not_read = check_source(config)
    content: list[object] = [
        _READING_VERSION,
        [asdict(archive) for archive in archives],
        captions and (captions.captions, captions.invalid),
        config.max_pixels,
        config.key_dot,
        *([config.label] if config.label else []),
    ]
    directory = f"{root}/{directory_name(config.source, 'pairs', content)}"
    manifest = prepare(
        lambda: ImageManifest.load(directory),
        lambda: IndexTask(config=config, archives=archives, directory=directory),
        source=config.source,
        directory=directory,
        max_bad_share=config.max_bad_share,
        noun="pair",
        **options,
    )
    return replace(manifest, not_read=not_read)


def check_source(config: PrepareImagesConfig) -> tuple[list[ImageArchive], CaptionFile | None, list[str]]:
    """Return the archives to prepare, the captions if they come in a file of their own, and the names that are not read."""
    archives, not_read = list_image_source(config.source)
    captions = config.load_captions()
    if captions is None and config.label != FOLDER_LABEL and any(archive.files for archive in archives):
        raise ValueError(
            f"source = {config.source!r} holds images in files of their own: captions must name a json file"
            + (f", or label must be {FOLDER_LABEL} instead of {config.label!r}" if config.label else "")
        )
    return archives, captions, not_read


# ---- one archive -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexTask:
    """Indexing of the archives of a source (see `pipelines.prepare.prepare`)."""

    config: PrepareImagesConfig
    archives: Sequence[ImageArchive]
    directory: str

    @property
    def unit_names(self) -> list[str]:
        """Names of the archives, in order."""
        return [f"archive-{number:05d}" for number in range(len(self.archives))]

    def run(self, number: int) -> dict[str, Any]:
        """Read one archive, decode each of its images once, and write an index of the usable pairs.

        Returns the fields of the archive's ImageShard and `lost`, the keys of its unusable images.
        """
        archive, file = self.archives[number], index_name(number)
        left_out: Counter[str] = Counter()
        unusable: list[str] = []
        columns: dict[str, list[Any]] = {name: [] for name in INDEX_SCHEMA.names}
        num_images = 0
        digest = hashlib.blake2b(digest_size=8)
        filesystem, _ = resolve_source(self.config.source)
        # An image in a file of its own is read at once.
        same = nullcontext() if archive.files else unchanged(filesystem, archive.path)
        with same, LostRecords(lost_name(f"{self.directory}/{file}")) as lost:
            for sample in self._usable(archive, lost, left_out, unusable):
                checksum = zlib.crc32(sample.data)
                for caption in sample.captions:
                    row = (sample.key, num_images, caption, sample.offset, len(sample.data), sample.member, checksum)
                    for column, value in zip(columns.values(), row, strict=True):
                        column.append(value)
                digest.update(json.dumps([sample.key, sample.captions, len(sample.data)]).encode())
                digest.update(sample.data)
                num_images += 1
        table = pa.table(columns, schema=INDEX_SCHEMA)
        write_bytes(f"{self.directory}/{file}", arrow_file(table.to_batches(), table.schema))
        shard = ImageShard(
            file=file,
            archive=archive.path,
            is_directory=bool(archive.files),
            num_bytes=archive.num_bytes,
            num_pairs=table.num_rows,
            num_images=num_images,
            digest=digest.hexdigest(),
            problems=dict(lost.problems),
            examples=lost.examples,
            left_out=dict(left_out),
            dropped=[],
            num_bytes_unread=lost.num_bytes_unread,
        )
        return asdict(shard) | {"lost": unusable}

    def _usable(
        self, archive: ImageArchive, lost: LostRecords, left_out: Counter[str], unusable: list[str]
    ) -> Iterator[ImageSample]:
        """Yield the samples whose images can be decoded; of several images of a tar with one key the first one stays.

        Everything else is counted in `lost` and `left_out`, and the keys of images that cannot be used in `unusable`.
        """
        config = self.config
        captions = config.load_captions()
        name = relative(archive.path, resolve_source(config.source)[1])
        keys: set[str] = set()
        for item in read_samples(config.source, archive, captions, key_dot=config.key_dot, label=config.label):
            if isinstance(item, LeftOut):
                is_counted = item.kind in left_out or len(left_out) < _NUM_KINDS_LEFT_OUT
                left_out[item.kind if is_counted else OTHER_KINDS] += 1
                continue
            if isinstance(item, Problem):
                lost.add(archive.path, item)
                continue
            where = item.member if archive.files else f"{name}/{item.member}"
            try:
                check_image(item.data, config.max_pixels)
            except ImageError as error:
                lost.add(archive.path, Problem(error.kind, where, str(error)))
                unusable.append(item.key)
                continue
            if item.key in keys:
                lost.add(archive.path, _report_duplicate(where, "in this archive"))
            else:
                keys.add(item.key)
                yield item

    def finish(self, records: Sequence[dict[str, Any]]) -> ImageManifest:
        """Combine the indexes of all archives into a manifest.

        A caption file names every image: one that no archive holds is a problem, and if several hold an image, the first one
        stays. Without one, the number of samples behind the place where a tar becomes unreadable is estimated, and of two
        archives with the same keys those of the second get the archive's name before them.
        """
        config = self.config
        captions = config.load_captions()
        shards = [ImageShard(**{name: value for name, value in record.items() if name != "lost"}) for record in records]
        reading = None
        with LostRecords(lost_name(f"{self.directory}/{ASSEMBLY}")) as lost:
            if captions is None:
                estimates = estimate_unread(shards, ProblemKind.UNREAD_SAMPLE, "sample")
                pairs = zip(shards, estimates, strict=True)
                shards = [lost.add_to(shard, [problem]) if problem else shard for shard, problem in pairs]
            images = [_list_images(open_index(self.directory, shard.file)) for shard in shards]
            repeated, distinct = _find_repeated([table.column("key") for table in images])
            root = resolve_source(config.source)[1]
            for number, rows in enumerate(repeated):
                if len(rows) and captions is None:
                    prefix = f"{relative(shards[number].archive, root)}/"
                    shards[number] = replace(shards[number], key_prefix=prefix)
                elif len(rows):
                    shards[number] = _drop(shards[number], images[number], rows, lost)
            if captions is not None:
                present = {key for record in records for key in record["lost"]}
                reading = _count_absent(captions, config.captions, present.union(distinct.to_pylist()), lost)
        return ImageManifest(
            directory=self.directory,
            source=config.source if "://" in config.source else resolve_source(config.source)[1],
            max_pixels=config.max_pixels,
            shards=shards,
            captions=reading,
        )


def _report_duplicate(where: str, place: str) -> Problem:
    return Problem(ProblemKind.DUPLICATED_KEY, where, f"the key has occurred before {place}; the first one stays")


# ---- all archives ----------------------------------------------------------------------------------------------------


def _list_images(table: pa.Table) -> pa.Table:
    """Return a table with one row per image: its key, its number in the index, and its number of pairs."""
    numbers, first, counts = np.unique(table.column("image").to_numpy(), return_index=True, return_counts=True)
    keys = table.column("key").take(pa.array(first, pa.int64()))
    return pa.table({"key": keys, "image": numbers, "num_pairs": counts})


def _find_repeated(keys: Sequence[pa.ChunkedArray]) -> tuple[list[np.ndarray], pa.Array]:
    """Return the rows of each shard whose keys have occurred in a shard before, and the distinct keys of all shards."""
    encoded = pa.array(pa.chunked_array(keys, pa.string()).combine_chunks(), pa.string()).dictionary_encode()
    codes = encoded.indices.to_numpy()  # Codes are numbered in order of first occurrence.
    is_first = codes > np.maximum.accumulate(np.concatenate([[-1], codes]))[:-1]
    bounds = np.cumsum([0, *map(len, keys)])
    return [np.flatnonzero(~is_first[start:stop]) for start, stop in itertools.pairwise(bounds)], encoded.dictionary


def _drop(shard: ImageShard, images: pa.Table, rows: np.ndarray, lost: LostRecords) -> ImageShard:
    """Remove images, given by their rows in the table of the shard's images, and count them as problems."""
    name = shard.archive.rsplit("/", 1)[-1]
    dropped = images.take(pa.array(rows, pa.int64()))
    places = [f"{name}/{key}" for key in dropped.column("key").to_pylist()]
    shard = lost.add_to(shard, (_report_duplicate(place, "in another archive") for place in places))
    return replace(
        shard,
        num_pairs=shard.num_pairs - int(dropped.column("num_pairs").to_numpy().sum()),
        num_images=shard.num_images - len(rows),
        dropped=dropped.column("image").to_pylist(),
    )


def _count_absent(captions: CaptionFile, uri: str, present: set[str], lost: LostRecords) -> CaptionReading:
    """Count as problems what the caption file names but `present` lacks, and its records that cannot be used."""
    found = [Problem(ProblemKind.INVALID_RECORD, w, detail) for w, detail in captions.invalid]
    detail = "named in the captions, but no archive holds it"
    found += [Problem(ProblemKind.ABSENT_IMAGE, name, detail) for name in captions.captions if name not in present]
    return lost.add_to(CaptionReading(path=uri, problems={}, examples=[]), found)


def describe(manifest: ImageManifest, seconds: float | None = None) -> str:
    """Summarise the counts of a prepared data set in one line, for a human reader."""
    left_out = f"; left out: {describe_counts(manifest.left_out)}" if manifest.left_out else ""
    duration = "" if seconds is None else f" in {seconds:.0f} s"
    return (
        f"{manifest.num_pairs} pairs of {manifest.num_images} images ({len(manifest.shards)} shards, digest "
        f"{manifest.digest}){duration}; unreadable: {describe_counts(manifest.problems)}{left_out}"
        f"{describe_not_read(manifest.not_read)}"
    )
