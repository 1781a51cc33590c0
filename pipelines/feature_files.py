"""Files that hold the stored features of a data set: what a frozen model computes of every item, as rows of fixed size.

The items of every shard of the data set are divided into Arrow files, each with a fixed number of rows, so that the file
and the row of an item follow from its shard and its row in it. The order of training is that of the data set.

Shapes: n rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from pipelines.ranges import range_reader
from pipelines.storage import compute_digest, resolve

FILE_BYTES = 64 << 20
"""Number of bytes of a file, and of what is held while a file is made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One of the arrays that a file has a row of for every item."""

    name: str
    """Name of the array."""
    dtype: type[np.generic]
    """Type of its numbers."""
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
        return np.frombuffer(array.buffers()[1], self.dtype, len(array) * math.prod(self.shape)).reshape(
            len(array), *self.shape
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FeaturePart:
    """Rows of one shard whose features share a file."""

    shard: int
    """Number of the shard."""
    start: int
    """First row of the shard that belongs to the part."""
    stop: int
    """Row after the last one."""
    file: str
    """Name of the file, relative to the directory of the features."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureFiles:
    """The files of one kind of items, such as the images of a data set; other kinds can lie in the same directory."""

    directory: str
    """Path or URI of the directory."""
    name: str
    """Name of the kind, with which the names of its files begin."""
    noun: str
    """What the rows are called in messages."""
    shard_sizes: tuple[int, ...]
    """Number of rows of every shard."""
    columns: tuple[Column, ...]
    """The arrays of a row."""
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
            yield FeaturePart(
                shard=shard,
                start=start,
                stop=min(start + self.rows_per_file, num_rows),
                file=self.file_name(shard, start),
            )

    def file_name(self, shard: int, row: int) -> str:
        """Return the name of the file that holds a row of a shard."""
        return f"{self.name}-{shard:06d}-{row // self.rows_per_file:06d}.arrow"

    def encode(self, part: FeaturePart, arrays: Mapping[str, np.ndarray]) -> bytes:
        """Return the content of the file with the rows of a part.

        Args:
            part: the part.
            arrays: an array (n, *shape) for every column, with the n rows of the part.
        """
        assert all(len(arrays[column.name]) == part.stop - part.start for column in self.columns)
        batch = pa.record_batch({column.name: column.to_arrow(arrays[column.name]) for column in self.columns})
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, batch.schema) as writer:
            writer.write_batch(batch)
        return bytes(sink.getvalue())

    def read(self, shards: np.ndarray, rows: np.ndarray, *, cache_bytes: int = 0) -> dict[str, np.ndarray]:
        """Return an array (n, *shape) for every column.

        Args:
            shards, rows: (n,) shard of every item, and its row in the shard; the result has the same order.
            cache_bytes: size of the node's cache of remote files in bytes; 0: none.

        Raises:
            OSError: if a file does not have the rows that it should have.
        """
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

    def paths_of(self, shards: Sequence[int]) -> list[str]:
        """Return the paths of the files of shards, within the filesystem of the directory."""
        root = resolve(self.directory)[1]
        return [f"{root}/{part.file}" for shard in shards for part in self.parts_of(shard)]

    def _open(self, shard: int, row: int, cache_bytes: int) -> dict[str, np.ndarray]:
        """Return the arrays of the file that holds a row; local files are memory-mapped."""
        path = resolve(f"{self.directory}/{self.file_name(shard, row)}")[1]
        batch = pa.ipc.open_file(range_reader(self.directory, cache_bytes).read_file(path)).get_batch(0)
        expected = min(self.rows_per_file, self.shard_sizes[shard] - row)
        if batch.num_rows != expected:
            raise OSError(
                f"{path} holds {batch.num_rows} {self.noun} instead of {expected}: prepare the features again"
            )
        return {column.name: column.from_arrow(batch.column(column.name)) for column in self.columns}


def prefetch(
    kinds: Sequence[FeatureFiles], cache_bytes: int, now: Sequence[int], later: Sequence[int], before: Sequence[int]
) -> None:
    """Fetch the files of shards into the node's cache in the background (see `pipelines.stream.RemoteSource`).

    Args:
        kinds: the kinds of files, which lie in one directory.
        cache_bytes: size of the cache in bytes.
        now, later, before: shards, see `pipelines.stream.RemoteSource`.
    """
    paths = [[path for files in kinds for path in files.paths_of(shards)] for shards in (now, later, before)]
    range_reader(kinds[0].directory, cache_bytes).prefetch(*paths, whole=True)


def describe_bytes(num_bytes: int) -> str:
    """Return a number of bytes in GiB, or in MiB below one GiB."""
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"


def features_directory(root: str, version: int, data_digest: str, settings: Mapping[str, Any]) -> str:
    """Return the directory of the features of a data set, whose name contains a hash of all that determines them.

    Args:
        root: directory or URI of prepared data.
        version: version of their format.
        data_digest: digest of the data set.
        settings: what else determines them: the digest of the model, its precision, and so on.
    """
    return f"{root}/features-{compute_digest([version, data_digest, dict(sorted(settings.items()))])}"
