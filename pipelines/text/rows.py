"""Read rows of the shards of a prepared text; remote shards are kept on the node's own disk and fetched ahead."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pyarrow as pa
from pyarrow import fs

from pipelines.object_store import is_local
from pipelines.ranges import range_reader
from pipelines.storage import resolve
from pipelines.text.growing import GrowingManifest
from pipelines.text.manifest import Manifest, ShardEntry


def read_rows(
    manifest: Manifest | GrowingManifest, shard: ShardEntry, rows: Sequence[int] | np.ndarray, cache_bytes: int = 0
) -> pa.Table:
    """Read the given rows of one shard, in the given order.

    A local shard is memory-mapped. A remote one is read completely, and memory-mapped from the node's cache of
    `cache_bytes` if there is one.

    Raises:
        OSError: if the shard does not have the number of rows that the manifest states.
    """
    path = resolve(f"{manifest.directory}/{shard.file}")[1]
    table = pa.ipc.open_file(range_reader(manifest.directory, cache_bytes).read_file(path)).read_all()
    if table.num_rows != shard.num_rows:
        raise OSError(f"{path} holds {table.num_rows} rows, its manifest says {shard.num_rows}: prepare it again")
    return table.take(pa.array(rows, pa.int64()))


def read_shards_ahead(manifest: Manifest | GrowingManifest, cache_bytes: int, *windows: Iterable[int]) -> None:
    """Fetch shards, given by number, into the node's cache in the background, if they are remote.

    Args:
        manifest: the prepared text.
        cache_bytes: size of the node's cache of remote files in bytes; 0: none, so that nothing is fetched.
        windows: the shards of the window that is being read, of the next one and of the one before
            (see `pipelines.stream.RemoteSource`).
    """
    root = resolve(manifest.directory)[1]
    paths = [[f"{root}/{manifest.shards[shard].file}" for shard in window] for window in windows]
    range_reader(manifest.directory, cache_bytes).read_ahead(*paths, whole=True)


def shard_bytes(manifest: Manifest) -> list[int]:
    """Return the size of every shard in bytes if they are remote, for the size of the cache; local ones count as 0."""
    filesystem, root = resolve(manifest.directory)
    if is_local(filesystem):
        return [0] * len(manifest.shards)
    files = filesystem.get_file_info(fs.FileSelector(root))
    sizes = {file.base_name: file.size or 0 for file in files}
    return [sizes.get(shard.file, 0) for shard in manifest.shards]
