"""What a prepared image–text data set holds: an index of every archive, with counts and digests, and what was wrong.

Pairs are numbered densely in the order of the shards and their rows; so are images, and the pairs of one image are
neighbours. N pairs.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa

from pipelines.problems import Reading
from pipelines.storage import read_json, resolve, write_json
from pipelines.text.manifest import MANIFEST_FILE

FORMAT_VERSION = 3

INDEX_SCHEMA = pa.schema(
    {
        "key": pa.string(),
        "image": pa.int64(),  # in the file: counted from 0, dropped ones included; `read_index` gives the dense number
        "caption": pa.string(),
        "offset": pa.int64(),  # of the image's bytes in the archive, or in the file of its own
        "size": pa.int64(),
        "member": pa.string(),  # the image's name in the archive, or its path below the directory
        "checksum": pa.uint32(),  # CRC-32 of the image's bytes
    }
)
"""One row a pair."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageShard:
    """The pairs of one archive."""

    file: str
    """Name of its index, relative to the manifest."""
    archive: str
    """Path of the tar, or of the directory of image files, within the filesystem of the manifest's source."""
    is_directory: bool
    num_bytes: int
    """Size of the tar."""
    num_pairs: int
    num_images: int
    digest: str
    """blake2b of keys, captions and image bytes."""
    problems: dict[str, int]
    """Problem kind → samples that it cost."""
    left_out: dict[str, int]
    """Suffix, or other kind → members and files that are no part of a sample, and no problem."""
    examples: list[str]
    """Where the first few problems are."""
    dropped: list[int]
    """Images in the index, as it counts them, whose key has occurred before."""

    @property
    def path(self) -> str:
        """Where it comes from."""
        return self.archive

    @property
    def num_records(self) -> int:
        """What the share of problems is a share of."""
        return self.num_images


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptionReading:
    """What was wrong with the json that captions come from."""

    path: str
    problems: dict[str, int]
    examples: list[str]

    @property
    def num_records(self) -> int:
        """Its images are counted by the archives that hold them."""
        return 0


@dataclass(frozen=True, kw_only=True)
class ImageManifest:
    """A prepared data set; read it with :meth:`load`."""

    directory: str
    """The URI that index files are relative to."""
    source: str
    """The URI that it was prepared from; images are read from there."""
    max_pixels: int
    """Larger images were refused."""
    shards: list[ImageShard]
    """One an archive, in order of path."""
    captions: CaptionReading | None
    """None where captions come with the images."""
    version: int = FORMAT_VERSION

    @cached_property
    def shard_sizes(self) -> tuple[int, ...]:
        """Pairs in every shard, for a `StreamPlan`."""
        return tuple(shard.num_pairs for shard in self.shards)

    @cached_property
    def first_pairs(self) -> np.ndarray:
        """The id of every shard's first pair, and N: (shards + 1,) int64."""
        return np.cumsum([0, *self.shard_sizes], dtype=np.int64)

    @cached_property
    def first_images(self) -> np.ndarray:
        """The number of every shard's first image, and the number of all images: (shards + 1,) int64."""
        return np.cumsum([0, *(shard.num_images for shard in self.shards)], dtype=np.int64)

    @property
    def num_pairs(self) -> int:
        """N; pair ids are 0 … N−1."""
        return int(self.first_pairs[-1])

    @property
    def num_images(self) -> int:
        """Image numbers are below it."""
        return int(self.first_images[-1])

    @property
    def readings(self) -> Sequence[Reading]:
        """Everything that was read, for `check_problems`."""
        return [*self.shards, *([self.captions] if self.captions else [])]

    @cached_property
    def problems(self) -> Counter[str]:
        """Problem kind → number, over all archives."""
        return sum((Counter(reading.problems) for reading in self.readings), Counter())

    @cached_property
    def left_out(self) -> Counter[str]:
        """Kind → number of members and files that are no part of a sample, over all archives."""
        return sum((Counter(shard.left_out) for shard in self.shards), Counter())

    @cached_property
    def digest(self) -> str:
        """16 hex digits over the shards: equal digests mean equal pairs in equal order."""
        content = json.dumps([[shard.digest, shard.dropped] for shard in self.shards])
        return hashlib.blake2b(content.encode(), digest_size=8).hexdigest()

    def save(self) -> None:
        """Write the manifest into its directory; its presence says that the directory is complete."""
        content = {key: value for key, value in asdict(self).items() if key != "directory"} | {"digest": self.digest}
        write_json(f"{self.directory}/{MANIFEST_FILE}", content)

    @classmethod
    def load(cls, directory: str) -> ImageManifest:
        """Read the manifest of a prepared directory.

        Raises:
            FileNotFoundError: if there is none.
            ValueError: if another version, or the preparation of text, wrote it.
        """
        content = read_json(f"{directory}/{MANIFEST_FILE}")
        if content is None:
            raise FileNotFoundError(f"{directory} holds no {MANIFEST_FILE}: it is not a (completely) prepared data set")
        if "shards" not in content or content["version"] != FORMAT_VERSION:
            raise ValueError(
                f"{directory} is no image data set of version {FORMAT_VERSION}: prepare it with jobs.prepare_images"
            )
        return cls(
            directory=directory,
            source=content["source"],
            max_pixels=content["max_pixels"],
            shards=[ImageShard(**shard) for shard in content["shards"]],
            captions=content["captions"] and CaptionReading(**content["captions"]),
        )


def read_index(manifest: ImageManifest, number: int) -> pa.Table:
    """The index of one shard: a row for each of its pairs, with dense image numbers.

    Raises:
        OSError: if the file is not the one that the manifest speaks of.
    """
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
    return table.set_column(column, "image", pa.array(manifest.first_images[number] + dense, pa.int64()))


def open_index(directory: str, file: str) -> pa.Table:
    """An index file as it is stored; a local one is memory-mapped."""
    filesystem, path = resolve(f"{directory}/{file}")
    is_local = filesystem.type_name == "local"
    with pa.memory_map(path) if is_local else filesystem.open_input_file(path) as source:
        return pa.ipc.open_file(source).read_all()
