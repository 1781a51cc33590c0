"""Stored features of a prepared text: the last hidden states of a frozen model, with the targets they predict.

The blocks of every shard of the text are divided into files of about 64 MiB, each with a fixed number of blocks, so that
the file and the row of a block follow from its shard and its row. The order of training is that of the text. A block of T
tokens with d numbers of bfloat16 each takes T·(2d + 4) + 8 bytes: hidden states, targets, and a digest of its tokens.

Shapes: n blocks, T tokens in a block, d hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from pipelines.manifest import read_manifest, write_manifest
from pipelines.ranges import range_reader
from pipelines.storage import compute_digest, resolve, write_bytes
from pipelines.stream import Batch
from pipelines.text.manifest import Manifest
from pipelines.text.packing import PackingConfig

_VERSION = 1
_FILE_BYTES = 64 << 20
_TARGET_BYTES, _DIGEST_BYTES = 4, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class FeaturePart:
    """Blocks of one shard of the text whose features share a file."""

    shard: int
    """Number of the shard."""
    start: int
    """First row of the shard that belongs to the part."""
    stop: int
    """Row after the last one."""
    file: str
    """Name of the file, relative to the directory of the features."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Features:
    """Description of the stored features of a text."""

    directory: str
    """Path or URI of the directory of the features."""
    text: Manifest
    """The prepared text, of packed blocks."""
    hidden_size: int
    """d, the number of numbers per token."""

    @property
    def context_length(self) -> int:
        """T, the number of tokens in a block."""
        assert isinstance(self.text.layout, PackingConfig)
        return self.text.layout.context_length

    @property
    def bytes_per_block(self) -> int:
        """Number of bytes that a block takes, apart from the headers of files."""
        return self.context_length * (2 * self.hidden_size + _TARGET_BYTES) + _DIGEST_BYTES

    @property
    def bytes_per_token(self) -> float:
        """Number of bytes per token."""
        return self.bytes_per_block / self.context_length

    @property
    def num_bytes(self) -> int:
        """Number of bytes of all blocks."""
        return self.bytes_per_block * self.text.num_rows

    @property
    def blocks_per_file(self) -> int:
        """Number of blocks in every file except the last one of a shard."""
        return max(1, _FILE_BYTES // self.bytes_per_block)

    def parts(self) -> Iterator[FeaturePart]:
        """Yield the parts of all shards, in order."""
        for number in range(len(self.text.shards)):
            yield from self.parts_of(number)

    def parts_of(self, shard: int) -> Iterator[FeaturePart]:
        """Yield the parts of a shard, given by its number, in order."""
        num_rows = self.text.shards[shard].num_rows
        for start in range(0, num_rows, self.blocks_per_file):
            yield FeaturePart(
                shard=shard,
                start=start,
                stop=min(start + self.blocks_per_file, num_rows),
                file=self.file_name(shard, start),
            )

    def file_name(self, shard: int, row: int) -> str:
        """Return the name of the file that holds the features of a row of a shard."""
        return f"features-{shard:06d}-{row // self.blocks_per_file:06d}.arrow"

    def save(self, base_digest: str) -> None:
        """Write the manifest, whose presence marks the features as complete."""
        content = {
            "version": _VERSION,
            "features": {"hidden_size": self.hidden_size, "base_digest": base_digest},
            "text": self.text.directory,
            "text_digest": self.text.digest,
        }
        write_manifest(self.directory, content)

    @classmethod
    def load(cls, directory: str, text: Manifest) -> Features:
        """Read the manifest of features that were prepared for a text.

        Raises:
            FileNotFoundError: if the features are missing or not complete.
            ValueError: if they belong to another text or version.
        """
        content = read_manifest(directory, noun="features", field="features", version=_VERSION)
        if content["text_digest"] != text.digest:
            raise ValueError(f"{directory} holds the features of another text: prepare them again")
        return cls(directory=directory, text=text, hidden_size=content["features"]["hidden_size"])


def features_directory(root: str, text: Manifest, **settings: str | bool) -> str:
    """Return the directory of the features of a text, whose name contains a hash of all that determines them.

    Args:
        root: directory or URI of prepared data.
        text: the prepared text.
        settings: what determines the hidden states: the digest of the model, its precision, and so on.
    """
    return f"{root}/features-{compute_digest([_VERSION, text.digest, dict(sorted(settings.items()))])}"


def write_part(features: Features, part: FeaturePart, hidden: np.ndarray, blocks: Batch) -> int:
    """Write the features of a part, atomically, and return the size of the file in bytes.

    Args:
        features: the features that the part belongs to.
        part: the part.
        hidden: (n, T, d) int16, the bits of bfloat16 numbers.
        blocks: `targets` (n, T) and `digest` (n,) of the same blocks.
    """
    widths = {"hidden": 2 * features.hidden_size * features.context_length, "targets": 4 * features.context_length}
    arrays = {"hidden": np.ascontiguousarray(hidden, np.int16), "targets": blocks["targets"].astype(np.int32)}
    columns: dict[str, pa.Array] = {
        name: pa.FixedSizeBinaryArray.from_buffers(
            pa.binary(width), part.stop - part.start, [None, pa.py_buffer(arrays[name])]
        )
        for name, width in widths.items()
    }
    columns["digest"] = pa.array(blocks["digest"], pa.int64())
    batch = pa.record_batch(list(columns.values()), names=list(columns))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)
    content = sink.getvalue()
    write_bytes(f"{features.directory}/{part.file}", content)
    return int(content.size)


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureSource:
    """Source of the stored features of blocks (see `pipelines.stream.Source`)."""

    features: Features
    """The features."""
    cache_bytes: int = 0
    """Size of the node's cache of remote files in bytes; 0: none."""

    def read(self, shards: np.ndarray, rows: np.ndarray, epoch: int) -> Batch:
        """Return `hidden` (n, T, d) int16 (bits of bfloat16), `targets` (n, T) and `digest` (n,) of n blocks.

        They do not depend on the epoch.
        """
        size = self.features.blocks_per_file
        count, length = len(rows), self.features.context_length
        batch: Batch = {
            "hidden": np.empty((count, length, self.features.hidden_size), np.int16),
            "targets": np.empty((count, length), np.int64),
            "digest": np.empty(count, np.int64),
        }
        files = np.stack([shards, rows // size])
        for shard, number in np.unique(files, axis=1).T:
            chosen = np.flatnonzero((files[0] == shard) & (files[1] == number))
            stored = self._open(int(shard), int(number) * size)
            for name, values in stored.items():
                batch[name][chosen] = values[rows[chosen] - number * size]
        return batch

    def read_ahead(self, now: Sequence[int], later: Sequence[int] = (), before: Sequence[int] = ()) -> None:
        """Fetch the files of shards into the node's cache in the background (see `pipelines.stream.RemoteSource`)."""
        root = resolve(self.features.directory)[1]
        paths = [
            [f"{root}/{part.file}" for shard in shards for part in self.features.parts_of(shard)]
            for shards in (now, later, before)
        ]
        range_reader(self.features.directory, self.cache_bytes).read_ahead(*paths, whole=True)

    def name(self, shard: int, row: int) -> str:
        """Return the file of the text and the row in it, for messages."""
        return f"{self.features.text.shards[shard].file}:{row}"

    def _open(self, shard: int, row: int) -> dict[str, np.ndarray]:
        """Return the arrays of the file that holds a row; local files are memory-mapped."""
        features = self.features
        file = features.file_name(shard, row)
        path = resolve(f"{features.directory}/{file}")[1]
        batch = pa.ipc.open_file(range_reader(features.directory, self.cache_bytes).read_file(path)).get_batch(0)
        expected = min(features.blocks_per_file, features.text.shards[shard].num_rows - row)
        if batch.num_rows != expected:
            raise OSError(f"{path} holds {batch.num_rows} blocks instead of {expected}: prepare the features again")
        shape = batch.num_rows, features.context_length
        return {
            "hidden": np.frombuffer(batch.column("hidden").buffers()[1], np.int16).reshape(
                *shape, features.hidden_size
            ),
            "targets": np.frombuffer(batch.column("targets").buffers()[1], np.int32).reshape(shape),
            "digest": batch.column("digest").to_numpy(),
        }


def read_feature_range(features: Features, start: int, stop: int) -> Batch:
    """Read the features of blocks start … stop−1 in stored order, for validation."""
    sizes = np.cumsum([0, *features.text.shard_sizes])
    places = np.arange(start, stop)
    shards = np.searchsorted(sizes, places, side="right") - 1
    return FeatureSource(features=features).read(shards, places - sizes[shards], 0)
