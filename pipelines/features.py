"""Stored features: what a frozen model computes of every block of a text, or of every image and caption, computed once.

The items of every shard of the data set are divided into Arrow files, each with a fixed number of rows, so that the file
and the row of an item follow from its shard and its row in it. The order of training is that of the data set.

Text: the last hidden states of d numbers in bfloat16 and the targets. A block of T tokens takes T·(2d + 4) + 8 bytes.

Pairs: an embedding for every image, of its central view (`pipelines.images.views.evaluation_view`), in 4d + 4 bytes, and one
for every caption, with its noise if there is any, in 4d + 10. They are float32: a similarity is divided by temperatures down
to .005, so that the rounding of bfloat16, up to .004 of a cosine, would change exp(similarity/τ) by factors of two. Beside
them are hashes of the view's pixels and of the caption's tokens, which give the digest that the pair has in training on the
towers, and the number of the caption's image.

Shapes: n rows (blocks, images or captions), T tokens in a block, d hidden size or dimensions of an embedding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import ClassVar, Self

import numpy as np
import pyarrow as pa

from pipelines.images.manifest import ImageManifest, read_index
from pipelines.images.pairs import locate_pairs, name_pair, pair_digest
from pipelines.ranges import range_reader
from pipelines.storage import arrow_file, compute_digest, read_manifest, resolve, write_manifest
from pipelines.stream import Batch
from pipelines.text.blocks import without_end
from pipelines.text.manifest import Manifest
from pipelines.text.packing import PackingConfig

FILE_BYTES = 64 << 20
"""Number of bytes of a file, and of what is held while a file is made."""

_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One of the arrays that a file has a row of for every item."""

    name: str
    dtype: type[np.generic]
    shape: tuple[int, ...] = ()
    """Shape of a row; empty for a single number."""

    @property
    def num_bytes(self) -> int:
        """Number of bytes of a row."""
        return np.dtype(self.dtype).itemsize * math.prod(self.shape)

    def to_arrow(self, values: np.ndarray) -> pa.Array:
        """Return an Arrow array of n rows (n, *shape), without a copy if the numbers have the type already."""
        buffer = pa.py_buffer(np.ascontiguousarray(values, self.dtype))
        if not self.shape:
            return pa.Array.from_buffers(pa.from_numpy_dtype(self.dtype), len(values), [None, buffer])
        return pa.FixedSizeBinaryArray.from_buffers(pa.binary(self.num_bytes), len(values), [None, buffer])

    def from_arrow(self, array: pa.Array) -> np.ndarray:
        """Return n rows (n, *shape) of an Arrow array, without a copy."""
        flat = np.frombuffer(array.buffers()[1], self.dtype, len(array) * math.prod(self.shape))
        return flat.reshape(len(array), *self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class FeaturePart:
    """Rows start … stop − 1 of one shard, whose features share a file."""

    shard: int
    start: int
    stop: int
    file: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureFiles:
    """The files of one kind of items, such as the images of a data set; other kinds can lie in the same directory."""

    directory: str
    name: str
    """Name of the kind, with which the names of its files begin."""
    noun: str
    """What the rows are called in messages."""
    shard_sizes: tuple[int, ...]
    columns: tuple[Column, ...]
    rows_per_file: int
    """Number of rows in every file except the last one of a shard."""

    @property
    def bytes_per_row(self) -> int:
        """Number of bytes that a row takes, apart from the headers of files."""
        return sum(column.num_bytes for column in self.columns)

    @property
    def num_bytes(self) -> int:
        """Number of bytes of all rows."""
        return self.bytes_per_row * sum(self.shard_sizes)

    def parts(self) -> Iterator[FeaturePart]:
        """Yield the parts of all shards, in order."""
        for number in range(len(self.shard_sizes)):
            yield from self.parts_of(number)

    def parts_of(self, shard: int) -> Iterator[FeaturePart]:
        """Yield the parts of a shard, given by its number, in order."""
        num_rows = self.shard_sizes[shard]
        for start in range(0, num_rows, self.rows_per_file):
            stop = min(start + self.rows_per_file, num_rows)
            yield FeaturePart(shard=shard, start=start, stop=stop, file=self._file_name(shard, start))

    def _file_name(self, shard: int, row: int) -> str:
        return f"{self.name}-{shard:06d}-{row // self.rows_per_file:06d}.arrow"

    def encode(self, part: FeaturePart, arrays: Mapping[str, np.ndarray]) -> bytes:
        """Return the content of the file of a part, given an array (n, *shape) of its n rows for every column."""
        assert all(len(arrays[column.name]) == part.stop - part.start for column in self.columns)
        batch = pa.record_batch({column.name: column.to_arrow(arrays[column.name]) for column in self.columns})
        return bytes(arrow_file([batch], batch.schema))

    def read(self, shards: np.ndarray, rows: np.ndarray, *, cache_bytes: int = 0) -> dict[str, np.ndarray]:
        """Return an array (n, *shape) for every column, given the shard of every item and its row in it, each (n,)."""
        arrays = {column.name: np.empty((len(rows), *column.shape), column.dtype) for column in self.columns}
        numbers = rows // self.rows_per_file
        for shard, number in np.unique(np.stack([shards, numbers]), axis=1).T:
            chosen = np.flatnonzero((shards == shard) & (numbers == number))
            first = int(number) * self.rows_per_file
            for name, values in self._open(int(shard), first, cache_bytes).items():
                arrays[name][chosen] = values[rows[chosen] - first]
        return arrays

    def places(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Return shards and rows, each (stop − start,), of the items start … stop−1 of the whole data set."""
        firsts = np.cumsum([0, *self.shard_sizes])
        numbers = np.arange(start, stop)
        shards = np.searchsorted(firsts, numbers, side="right") - 1
        return shards, numbers - firsts[shards]

    def _open(self, shard: int, row: int, cache_bytes: int) -> dict[str, np.ndarray]:
        """Return the arrays of the file that holds a row; local files are memory-mapped."""
        path = resolve(f"{self.directory}/{self._file_name(shard, row)}")[1]
        batch = pa.ipc.open_file(range_reader(self.directory, cache_bytes).read_file(path)).get_batch(0)
        expected = min(self.rows_per_file, self.shard_sizes[shard] - row)
        if batch.num_rows != expected:
            raise OSError(
                f"{path} holds {batch.num_rows} {self.noun} instead of {expected}: prepare the features again"
            )
        return {column.name: column.from_arrow(batch.column(column.name)) for column in self.columns}


def _prefetch(kinds: Sequence[FeatureFiles], cache_bytes: int, *windows: Sequence[int]) -> None:
    """Fetch the files of the shards of windows into the node's cache (see `pipelines.stream.Source`)."""
    root = resolve(kinds[0].directory)[1]
    paths = [
        [f"{root}/{part.file}" for files in kinds for shard in window for part in files.parts_of(shard)]
        for window in windows
    ]
    range_reader(kinds[0].directory, cache_bytes).prefetch(*paths, whole=True)


def describe_bytes(num_bytes: int) -> str:
    """Return a number of bytes in GiB, or in MiB below one GiB."""
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"


def features_directory(root: str, data: Manifest | ImageManifest, **settings: object) -> str:
    """Return the directory of the features of a data set; a hash in its name is that of the data and of the settings."""
    return f"{root}/features-{compute_digest([_VERSION, data.digest, dict(sorted(settings.items()))])}"


@dataclass(frozen=True, kw_only=True)  # without slots, which leave no place for class variables
class _Stored:
    """Description of what is stored of a data set; its manifest holds the fields of the class beside directory and data."""

    noun: ClassVar[str]
    """What is stored, in messages and in the manifest."""
    data: ClassVar[str]
    """Name of the field that holds the data set."""

    directory: str

    def save(self, base_digest: str) -> None:
        """Write the manifest, whose presence marks what is stored as complete."""
        data = getattr(self, self.data)
        sizes = {
            item.name: getattr(self, item.name) for item in fields(self) if item.name not in ("directory", self.data)
        }
        content = {self.noun: sizes | {"base_digest": base_digest}, self.data: data.directory}
        write_manifest(self.directory, {"version": _VERSION, **content, f"{self.data}_digest": data.digest})

    def _files(
        self, name: str, sizes: tuple[int, ...], *columns: Column, noun: str = "", num_input_bytes: int = 0
    ) -> FeatureFiles:
        """Return files of as many rows as fit into memory, and as `num_input_bytes` of which each is computed do."""
        num_rows = max(1, FILE_BYTES // max(num_input_bytes, sum(column.num_bytes for column in columns)))
        return FeatureFiles(
            directory=self.directory,
            name=name,
            noun=noun or name,
            shard_sizes=sizes,
            columns=columns,
            rows_per_file=num_rows,
        )

    @classmethod
    def load(cls, directory: str, data: Manifest | ImageManifest) -> Self:
        """Read the manifest; FileNotFoundError if what is stored is not complete, ValueError if it is of other data."""
        content = read_manifest(directory, noun=cls.noun, field=cls.noun, version=_VERSION)
        if content[f"{cls.data}_digest"] != data.digest:
            raise ValueError(f"{directory} holds the {cls.noun} of other {cls.data}: prepare them again")
        sizes = {name: value for name, value in content[cls.noun].items() if name != "base_digest"}
        return cls(directory=directory, **{cls.data: data}, **sizes)


# ---- text ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Features(_Stored):
    """Description of the stored features of a text."""

    noun, data = "features", "text"

    text: Manifest
    hidden_size: int
    """d, the number of numbers per token."""

    @property
    def blocks(self) -> FeatureFiles:
        """The files, with a row for every block."""
        assert isinstance(self.text.layout, PackingConfig)
        num_tokens = self.text.layout.context_length
        columns = (
            # NumPy has no bfloat16, so its bits are held as int16.
            Column(name="hidden", dtype=np.int16, shape=(num_tokens, self.hidden_size)),
            Column(name="targets", dtype=np.int32, shape=(num_tokens,)),
            Column(name="digest", dtype=np.int64),
        )
        return self._files("features", self.text.shard_sizes, *columns, noun="blocks")

    def describe_size(self) -> str:
        """Return how much the features take, in total and per token."""
        assert isinstance(self.text.layout, PackingConfig)
        num_tokens, blocks = self.text.layout.context_length, self.blocks
        return (
            f"{describe_bytes(blocks.num_bytes)}: {self.text.num_rows * num_tokens:,} tokens × "
            f"{blocks.bytes_per_row / num_tokens:,.0f} bytes (hidden size {self.hidden_size} in bfloat16, and the target)"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureSource:
    """Source of the stored features of blocks (see `pipelines.stream.Source`)."""

    features: Features
    cache_bytes: int = 0
    """Size of the node's cache of remote files in bytes; 0: none."""
    end_is_target: bool = True
    """Whether the model is to predict the end-of-text token (see `pipelines.text.blocks.without_end`)."""

    def read(self, shards: np.ndarray, rows: np.ndarray, epoch: int) -> Batch:
        """Return `hidden` (n, T, d) int16 (bits of bfloat16), `targets` (n, T) and `digest` (n,), the same in every epoch."""
        batch = self.features.blocks.read(shards, rows, cache_bytes=self.cache_bytes)
        batch = batch | {"targets": batch["targets"].astype(np.int64)}
        return batch if self.end_is_target else without_end(batch, self.features.text)

    def prefetch(self, *windows: Sequence[int]) -> None:
        """Fetch the files of shards into the node's cache in the background (see `pipelines.stream.Source`)."""
        _prefetch([self.features.blocks], self.cache_bytes, *windows)

    def name(self, shard: int, row: int) -> str:
        """Return the file of the text and the row in it, for messages."""
        return f"{self.features.text.shards[shard].file}:{row}"


def read_feature_range(features: Features, start: int, stop: int) -> Batch:
    """Read the features of blocks start … stop−1 in stored order, for validation."""
    return FeatureSource(features=features).read(*features.blocks.places(start, stop), 0)


# ---- pairs -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PairEmbeddings(_Stored):
    """Description of the stored embeddings of a data set of pairs."""

    noun, data = "embeddings", "pairs"

    pairs: ImageManifest
    embedding_size: int
    """d, the number of dimensions."""
    image_size: int
    """Side of the views in pixels; a file holds no more images than have views that fit into memory together."""
    num_text_tokens: int
    """Number of tokens of a caption, which bounds the captions of a file likewise."""

    @property
    def images(self) -> FeatureFiles:
        """The files with a row for every image."""
        sizes = tuple(shard.num_images for shard in self.pairs.shards)
        columns = self._embedding, Column(name="pixel_hash", dtype=np.uint32)
        return self._files("images", sizes, *columns, num_input_bytes=3 * self.image_size**2)

    @property
    def captions(self) -> FeatureFiles:
        """The files with a row for every caption, that is, for every pair."""
        columns = self._embedding, Column(name="image", dtype=np.int64), Column(name="token_hash", dtype=np.uint16)
        num_input_bytes = 2 * 8 * self.num_text_tokens  # tokens and mask
        return self._files("captions", self.pairs.shard_sizes, *columns, num_input_bytes=num_input_bytes)

    @property
    def _embedding(self) -> Column:
        return Column(name="embedding", dtype=np.float32, shape=(self.embedding_size,))

    @property
    def num_bytes(self) -> int:
        """Number of bytes of all embeddings."""
        return self.images.num_bytes + self.captions.num_bytes

    def describe_size(self) -> str:
        """Return how much the embeddings take, in total, and of an image and a caption."""
        return (
            f"{describe_bytes(self.num_bytes)}: {self.pairs.num_images:,} images × {self.images.bytes_per_row:,} bytes and "
            f"{self.pairs.num_pairs:,} captions × {self.captions.bytes_per_row:,} bytes "
            f"(embeddings of {self.embedding_size} in float32, of the central view of every image)"
        )

    def read_held_out(self, num_images: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the embeddings of the first images (num_images, d), and for validation of all m captions of these (m, d).

        The third array, (m,), has the number of the image that each caption belongs to.
        """
        images = self.images.read(*self.images.places(0, num_images))
        captions = self.captions.read(*self.captions.places(0, self.pairs.num_pairs))
        chosen = captions["image"] < num_images
        return images["embedding"], captions["embedding"][chosen], captions["image"][chosen]


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingSource:
    """Source of the stored embeddings of pairs (see `pipelines.stream.Source`)."""

    embeddings: PairEmbeddings
    cache_bytes: int = 0
    """Size of the node's cache of remote files in bytes; 0: none."""

    def read(self, shards: np.ndarray, rows: np.ndarray, epoch: int) -> Batch:
        """Return the training arrays of n pairs, which do not depend on the epoch.

        `image_embeddings`, `text_embeddings` (n, d) float32; `ids`, `image_ids` and `digest` (n,) int64, those of
        `pipelines.images.pairs.PairSource.read` without augmentation.
        """
        stored, pairs = self.embeddings, self.embeddings.pairs
        captions = stored.captions.read(shards, rows, cache_bytes=self.cache_bytes)
        # The pairs of an image are in the shard of the image.
        image_rows = captions["image"] - pairs.first_images[shards]
        images = stored.images.read(shards, image_rows, cache_bytes=self.cache_bytes)
        return {
            "image_embeddings": images["embedding"],
            "text_embeddings": captions["embedding"],
            "ids": pairs.first_pairs[shards] + rows,
            "image_ids": captions["image"],
            "digest": pair_digest(images["pixel_hash"].astype(np.int64), captions["token_hash"].astype(np.int64)),
        }

    def prefetch(self, *windows: Sequence[int]) -> None:
        """Fetch the files of shards into the node's cache in the background (see `pipelines.stream.Source`)."""
        _prefetch([self.embeddings.images, self.embeddings.captions], self.cache_bytes, *windows)

    def name(self, shard: int, row: int) -> str:
        """Return the key, the archive and the id of a pair, for messages."""
        return name_pair(self.embeddings.pairs, read_index(self.embeddings.pairs, shard), shard, row)

    def locate(self, ids: Sequence[int] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (shards, rows), each (n,), of the pairs with these ids; see `PairSource.locate`."""
        return locate_pairs(self.embeddings.pairs, ids)
