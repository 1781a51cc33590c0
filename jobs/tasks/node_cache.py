"""The size of the cache that each node keeps of data from an object store, and whether it is large enough for them."""

from __future__ import annotations

import math
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

    The order within a window is random, so with a cache that is smaller than a window a part of the samples would take
    requests of their own. In a cache that holds a window, but not two, the next one is fetched when it begins.

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
            f"warning: data.cache_gib = {data.cache_gib:g} is less than the {_gib(need)} GiB that the largest window of "
            f"data.{split} takes, so data are read from the object store without a cache, sample by sample: set "
            f"data.cache_gib to {_gib(need)} or more (twice as much lets the next window be fetched ahead), with room for "
            f"it in ${DIRECTORY_VARIABLE} on every node, or choose a smaller data.shuffle_window",
            flush=True,
        )
    return 0


def _gib(num_bytes: int) -> str:
    """Return a number of bytes in GiB, rounded up to two decimals, so that a cache of this size is large enough."""
    return f"{math.ceil(num_bytes / GIB * 100) / 100:g}"
