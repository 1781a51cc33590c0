"""The size of the cache that each node keeps of data from an object store, and whether it is large enough for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pipelines.block_cache import DIRECTORY_VARIABLE
from pipelines.plan import StreamPlan

GIB = 2**30


class CachedData(Protocol):
    """What the data sections of all tasks have in common."""

    @property
    def cache_gib(self) -> float:
        """Size of the cache in GiB; 0: no cache."""
        ...


def cache_bytes(data: CachedData, *, plan: StreamPlan, shard_bytes: Sequence[int], split: str = "") -> int:
    """Return the size in bytes of the cache for reading shards, which is 0 if the cache is smaller than they need.

    The order within a window is random, so a cache that is smaller than a window and the next one would fetch a whole
    block for almost every sample.

    Args:
        data: the data section of the run.
        plan: order in which the samples are visited.
        shard_bytes: size of every shard in bytes; 0 for shards that are not in an object store.
        split: name of the data; if it is given, a cache that is too small is reported on the terminal.
    """
    if not data.cache_gib or not sum(shard_bytes):
        return 0
    need = plan.cache_need(shard_bytes)
    if need <= data.cache_gib * GIB:
        return round(data.cache_gib * GIB)
    if split:
        print(
            f"warning: data.cache_gib = {data.cache_gib:g} is less than the {need / GIB:.3g} GiB that two windows of "
            f"data.{split} take, so data are read from the object store without a cache, sample by sample: set "
            f"data.cache_gib to {need / GIB:.3g} or more, with room for it in ${DIRECTORY_VARIABLE} on every node, or "
            "choose a smaller data.shuffle_window",
            flush=True,
        )
    return 0
