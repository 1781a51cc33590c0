"""Read rows of the shards of a prepared text, and packed blocks as training arrays, for a `RankStream` or in stored order.

Remote shards are kept on the node's own disk and prefetched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from pyarrow import fs

from pipelines.object_store import is_local
from pipelines.ranges import gather_rows, range_reader
from pipelines.storage import resolve
from pipelines.stream import Batch, row_digests
from pipelines.text.manifest import Manifest, ShardEntry
from pipelines.text.packing import IGNORE_INDEX, PackingConfig

if TYPE_CHECKING:  # It imports Ray.
    from pipelines.text.growing import GrowingManifest


@dataclass(frozen=True, kw_only=True)
class TextSource:
    """Rows of a prepared text, of which a `pipelines.stream.Source` makes arrays."""

    manifest: Manifest | GrowingManifest
    """Prepared data set, which may still be growing."""
    cache_bytes: int = 0
    """Size of the node's cache of remote shards in bytes; 0: none, so that a shard is read anew every time."""

    def gather(self, shards: np.ndarray, rows: np.ndarray) -> pa.Table:
        """Return n rows, given their shards and rows in them, each (n,)."""
        return gather_rows(
            shards, rows, lambda s, r: read_rows(self.manifest, self.manifest.shard(s), r, self.cache_bytes)
        )

    def prefetch(self, *windows: Sequence[int]) -> None:
        """Fetch remote shards into the node's cache in the background (see `pipelines.stream.Source`)."""
        root = resolve(self.manifest.directory)[1]
        paths = [[f"{root}/{self.manifest.shard(shard).file}" for shard in window] for window in windows]
        range_reader(self.manifest.directory, self.cache_bytes).prefetch(*paths, whole=True)

    def name(self, shard: int, row: int) -> str:
        """Return the shard file, row, archive, part and first document of a row, for messages."""
        entry = self.manifest.shard(shard)
        document = read_rows(self.manifest, entry, [row], self.cache_bytes).column("document")[0].as_py()
        return f"{entry.file}:{row} (document {document} of part {entry.part} of {entry.archive})"


@dataclass(frozen=True, kw_only=True)
class BlockSource(TextSource):
    """Source of the blocks of a prepared text (see `pipelines.stream.Source`)."""

    end_is_target: bool = True
    """Whether the model is to predict the end-of-text token (see :func:`without_end`)."""

    def read(self, shards: np.ndarray, rows: np.ndarray, epoch: int) -> Batch:
        """Return `input_ids`, `position_ids`, `targets`, each (n, T), and `digest` (n,) of n blocks of T tokens.

        Blocks do not depend on the epoch.
        """
        batch = block_arrays(self.manifest, self.gather(shards, rows))
        del batch["documents"]
        return batch if self.end_is_target else without_end(batch, self.manifest)


def block_arrays(manifest: Manifest | GrowingManifest, table: pa.Table) -> Batch:
    """Return the arrays of stored blocks (`PackingConfig.unpack`), and `digest` (n,) int64, hashes of their tokens in
    [0, 2^48)."""
    assert isinstance(manifest.layout, PackingConfig)
    arrays: dict[str, Any] = manifest.layout.unpack(table)
    return arrays | {"digest": row_digests(row.tobytes() for row in arrays["input_ids"])}


def without_end(batch: Batch, manifest: Manifest | GrowingManifest) -> Batch:
    """Return a batch in which no target is the end-of-text token.

    A model that was not trained to end documents by this token gives it no probability, and would be judged by the
    miscalibration of one token in a document instead of by its text.
    """
    assert isinstance(manifest.layout, PackingConfig)
    targets = batch["targets"]
    return batch | {"targets": np.where(targets == manifest.layout.eos_id, IGNORE_INDEX, targets)}


def read_range(manifest: Manifest, start: int, stop: int) -> Batch:
    """Read blocks start … stop−1 in stored order, without Ray, for validation.

    Beside the arrays of `block_arrays`, `parts` (n,) holds the number of each block's part among all parts, so that part
    and number in `documents` together identify a document.
    """
    tables, parts, first = [], [], 0
    numbers = {key: number for number, key in enumerate(dict.fromkeys((s.archive, s.part) for s in manifest.shards))}
    for shard in manifest.shards:
        low, high = max(start - first, 0), min(stop - first, shard.num_rows)
        if low < high:
            tables.append(read_rows(manifest, shard, range(low, high)))
            parts += [numbers[shard.archive, shard.part]] * (high - low)
        first += shard.num_rows
    return block_arrays(manifest, pa.concat_tables(tables)) | {"parts": np.array(parts, dtype=np.int64)}


# ---- rows ------------------------------------------------------------------------------------------------------------


def read_rows(
    manifest: Manifest | GrowingManifest, shard: ShardEntry, rows: Sequence[int] | np.ndarray, cache_bytes: int = 0
) -> pa.Table:
    """Read rows of a shard in the given order; a remote one is read whole, and mapped from the node's cache if any."""
    path = resolve(f"{manifest.directory}/{shard.file}")[1]
    table = pa.ipc.open_file(range_reader(manifest.directory, cache_bytes).read_file(path)).read_all()
    if table.num_rows != shard.num_rows:
        raise OSError(f"{path} holds {table.num_rows} rows, its manifest says {shard.num_rows}: prepare it again")
    return table.take(pa.array(rows, pa.int64()))


def shard_bytes(manifest: Manifest) -> list[int]:
    """Return the size of every shard in bytes if they are remote, for the size of the cache; local ones count as 0."""
    filesystem, root = resolve(manifest.directory)
    if is_local(filesystem):
        return [0] * len(manifest.shards)
    files = filesystem.get_file_info(fs.FileSelector(root))
    sizes = {file.base_name: file.size or 0 for file in files}
    return [sizes.get(shard.file, 0) for shard in manifest.shards]
