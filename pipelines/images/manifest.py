"""Manifest of a prepared image–text data set: an index of every archive with counts, digests and problems.

Pairs are numbered without gaps (0 … N−1) in the order of the archives' shards and of the rows within them, and so are
images; the pairs of one image are adjacent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.plan import StreamPlan
from pipelines.problems import Reading, lost_name
from pipelines.ranges import range_reader
from pipelines.storage import compute_digest, read_manifest, resolve, write_manifest

FORMAT_VERSION = 3

ASSEMBLY = "assembly"
"""Base name of the file of lost records that only all archives together show (see `pipelines.problems.lost_name`)."""

INDEX_SCHEMA = pa.schema(
    {
        "key": pa.string(),
        # In the file, images are numbered from 0 per archive, dropped ones included; `read_index` returns global
        # numbers.
        "image": pa.int64(),
        "caption": pa.string(),
        "offset": pa.int64(),  # Position of the image's first byte in the tar; 0 for an image in a file of its own.
        "size": pa.int64(),  # Size of the image's bytes.
        "member": pa.string(),  # Name of the image in the tar, or its path relative to the directory.
        "checksum": pa.uint32(),  # CRC-32 of the image's bytes.
    }
)
"""Columns of an index file, which has one row per pair."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageShard:
    """The pairs of one archive."""

    file: str
    """Name of the index file, relative to the manifest."""
    archive: str
    """Path of the tar, or of the directory of image files, within the filesystem of the manifest's source."""
    is_directory: bool
    """Whether the archive is a group of image files in a directory rather than a tar."""
    num_bytes: int
    """Size of the tar, or total size of the image files, in bytes."""
    num_pairs: int
    """Number of pairs, without those of dropped images."""
    num_images: int
    """Number of images, without dropped ones."""
    digest: str
    """blake2b hash of keys, captions and image bytes."""
    problems: dict[str, int]
    left_out: dict[str, int]
    """Number of members and files that belong to no sample and are no problem, by suffix or other kind."""
    examples: list[str]
    dropped: list[int]
    """Numbers, as in the index file, of the images that are ignored because their key occurred before."""
    num_bytes_unread: int | None = None
    """Number of bytes behind the place where it could not be read further (`pipelines.problems.Problem`)."""
    key_prefix: str = ""
    """What the keys of the data set begin with, beside those of the index file, as earlier archives have some of them too."""

    @property
    def path(self) -> str:
        """Path of the archive that the shard was read from."""
        return self.archive

    @property
    def num_records(self) -> int:
        """Number of readable records (images), which `check_problems` compares the problems with."""
        return self.num_images


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptionReading:
    """Problems with the JSON file that the captions come from."""

    path: str
    problems: dict[str, int]
    examples: list[str]

    @property
    def num_records(self) -> int:
        """Always 0, because the images are already counted in the archives that hold them."""
        return 0


@dataclass(frozen=True, kw_only=True)
class ImageManifest:
    """Description of a prepared data set; use :meth:`load` to read it."""

    directory: str
    source: str
    """URI that the data set was prepared from; images are still read from there."""
    max_pixels: int
    """Maximum number of pixels of an image; larger images were rejected."""
    shards: list[ImageShard]
    captions: CaptionReading | None
    """Problems with the caption file, or None if captions are stored with the images."""
    version: int = FORMAT_VERSION
    not_read: list[str] = field(default_factory=list, compare=False)
    """Names of the files of the source that were not read when the data were last asked for; they are not stored."""

    def plan(self, *, seed: int, window_size: int) -> StreamPlan:
        """Return the order in which training visits the pairs."""
        identity = {"pairs": self.digest}
        return StreamPlan(shard_sizes=self.shard_sizes, seed=seed, window_size=window_size, identity=identity)

    @cached_property
    def shard_sizes(self) -> tuple[int, ...]:
        """Number of pairs in every shard, for a `StreamPlan`."""
        return tuple(shard.num_pairs for shard in self.shards)

    @cached_property
    def first_pairs(self) -> np.ndarray:
        """Id of every shard's first pair, followed by the total N: (shards + 1,) int64."""
        return np.cumsum([0, *self.shard_sizes], dtype=np.int64)

    @cached_property
    def first_images(self) -> np.ndarray:
        """Number of every shard's first image, followed by the total number of images: (shards + 1,) int64."""
        return np.cumsum([0, *(shard.num_images for shard in self.shards)], dtype=np.int64)

    @property
    def num_pairs(self) -> int:
        """Total number N of pairs; pair ids are 0 … N−1."""
        return int(self.first_pairs[-1])

    @property
    def num_images(self) -> int:
        """Total number M of images; image numbers are 0 … M−1."""
        return int(self.first_images[-1])

    @property
    def readings(self) -> Sequence[Reading]:
        """Summaries of everything that was read, for `check_problems`."""
        return [*self.shards, *([self.captions] if self.captions else [])]

    @property
    def lost_files(self) -> list[str]:
        """Names of the files that list the lost records, in stored order."""
        return [lost_name(name) for name in [*map(index_name, range(len(self.shards))), ASSEMBLY]]

    @cached_property
    def problems(self) -> Counter[str]:
        """Number of lost samples by kind of problem, over all archives and the caption file."""
        return sum((Counter(reading.problems) for reading in self.readings), Counter())

    @cached_property
    def left_out(self) -> Counter[str]:
        """Number of members and files that belong to no sample, by kind, over all archives."""
        return sum((Counter(shard.left_out) for shard in self.shards), Counter())

    @cached_property
    def digest(self) -> str:
        """Hash of all shards as 16 hex digits; equal digests mean equal pairs in equal order."""
        return compute_digest([[shard.digest, shard.dropped] for shard in self.shards])

    def save(self) -> None:
        """Write the manifest to its directory; the presence of this file marks the directory as complete."""
        content = {key: value for key, value in asdict(self).items() if key not in ("directory", "not_read")}
        content |= {"digest": self.digest}
        write_manifest(self.directory, content)

    @classmethod
    def load(cls, directory: str) -> ImageManifest:
        """Read a manifest; FileNotFoundError if there is none, ValueError if of another version, or of text."""
        content = read_manifest(directory, noun="images", field="shards", version=FORMAT_VERSION)
        return cls(
            directory=directory,
            source=content["source"],
            max_pixels=content["max_pixels"],
            shards=[ImageShard(**shard) for shard in content["shards"]],
            captions=content["captions"] and CaptionReading(**content["captions"]),
        )


def index_name(number: int) -> str:
    """Return the file name of the index of archive `number`."""
    return f"index-{number:05d}.arrow"


def read_index(manifest: ImageManifest, number: int) -> pa.Table:
    """Read the index of a shard: one row per pair, with image numbers and keys that are unique in the whole data set."""
    shard = manifest.shards[number]
    table = open_index(manifest.directory, shard.file)
    images = table.column("image").to_numpy()
    keep = ~np.isin(images, shard.dropped)
    table = table.filter(pa.array(keep)) if shard.dropped else table
    if table.num_rows != shard.num_pairs:
        raise OSError(
            f"{manifest.directory}/{shard.file} holds {table.num_rows} pairs, its manifest says {shard.num_pairs}: "
            "prepare it again"
        )
    _, dense = np.unique(images[keep], return_inverse=True)
    column = table.schema.get_field_index("image")
    table = table.set_column(column, "image", pa.array(manifest.first_images[number] + dense, pa.int64()))
    if shard.key_prefix:
        keys = pc.binary_join_element_wise(shard.key_prefix, table.column("key"), "")
        table = table.set_column(table.schema.get_field_index("key"), "key", keys)
    return table


def open_index(directory: str, file: str) -> pa.Table:
    """Read an index file unchanged; a local file is memory-mapped."""
    path = resolve(f"{directory}/{file}")[1]
    return pa.ipc.open_file(range_reader(directory).read_file(path)).read_all()
