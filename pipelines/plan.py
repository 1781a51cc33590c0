"""The order of training data as a pure function of (seed, manifest): which item stands at which place of the stream.

The stream is epoch 0, epoch 1, …, without end; an epoch visits every item exactly once. Batch k is places kB … (k+1)B−1,
and batches run across the end of an epoch, so nothing is dropped and nothing depends on the number of workers. Shards
are permuted, grouped into windows, and the items of a window are permuted: a reader holds one window at a time.

The cursor of a run is one number: the next place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A run of places whose items all lie in a few shards."""

    epoch: int
    index: int
    """Which window of its epoch."""
    start: int
    """Its first place in the stream."""
    shards: tuple[int, ...]
    num_items: int

    @property
    def stop(self) -> int:
        """The place after its last."""
        return self.start + self.num_items


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamPlan:
    """The order of the items of a data set whose shards hold `shard_sizes` items."""

    shard_sizes: tuple[int, ...]
    seed: int
    window_size: int = 32_768
    """A window is closed once it holds this many items."""

    def __post_init__(self) -> None:
        if self.num_items_per_epoch == 0:
            raise ValueError("the data set holds no items")

    @property
    def num_items_per_epoch(self) -> int:
        """Blocks in one epoch: all of them."""
        return sum(self.shard_sizes)

    def windows(self, start: int, stop: int) -> Iterator[Window]:
        """The windows that hold the places start … stop−1, in order."""
        epoch = start // self.num_items_per_epoch
        while epoch * self.num_items_per_epoch < stop:
            yield from (window for window in self.epoch(epoch) if window.stop > start and window.start < stop)
            epoch += 1

    def epoch(self, epoch: int) -> list[Window]:
        """The windows of one epoch, in order."""
        order = np.random.default_rng([self.seed, epoch]).permutation(len(self.shard_sizes))
        windows: list[Window] = []
        group: list[int] = []
        place = epoch * self.num_items_per_epoch
        for number, shard in enumerate(order.tolist()):
            group.append(shard)
            num_items = sum(self.shard_sizes[member] for member in group)
            if num_items >= self.window_size or number == len(order) - 1:
                windows.append(
                    Window(epoch=epoch, index=len(windows), start=place, shards=tuple(group), num_items=num_items)
                )
                place += num_items
                group = []
        return [window for window in windows if window.num_items]

    def locate(self, window: Window, places: Sequence[int] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(shard, row) of the given places, all of which lie in the window."""
        permutation, bounds = _window_order(self, window)
        chosen = permutation[np.asarray(places) - window.start]
        member = np.searchsorted(bounds, chosen, side="right") - 1
        return np.asarray(window.shards)[member], chosen - bounds[member]


@lru_cache(maxsize=4)
def _window_order(plan: StreamPlan, window: Window) -> tuple[np.ndarray, np.ndarray]:
    """The permutation of a window's items, and where each of its shards begins in the unpermuted order."""
    permutation = np.random.default_rng([plan.seed, window.epoch, window.index]).permutation(window.num_items)
    sizes = [plan.shard_sizes[shard] for shard in window.shards]
    return permutation, np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int64)


def rank_places(start: int, stop: int, *, batch_size: int, rank: int, world_size: int) -> np.ndarray:
    """The places in start … stop−1 that belong to one rank: slots rank·B/W … of every batch."""
    places = np.arange(start, stop)
    num_per_rank = batch_size // world_size
    slot = places % batch_size
    return places[slot // num_per_rank == rank]
