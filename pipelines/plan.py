"""Compute the order of training data, a pure function of (seed, manifest): which item is at which place of the stream.

The stream is the infinite sequence epoch 0, epoch 1, …; each epoch visits every item exactly once. A *place* is an
index into the stream. With B items per batch, batch k consists of places kB … (k+1)B−1. Batches may cross the end of
an epoch, so no item is dropped and the order does not depend on the number of workers. In each epoch the shards are
permuted and grouped into windows, and the items within a window are permuted, so that a reader needs only one window
in memory at a time.

The cursor of a run, which is all that is needed to resume it, is a single number: the next place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Contiguous range of places whose items all lie in a few shards."""

    epoch: int
    """Epoch that the window belongs to, counted from 0."""
    index: int
    """Number of the window within its epoch, counted from 0."""
    start: int
    """First place of the window in the stream."""
    shards: tuple[int, ...]
    """Numbers of the shards whose items the window holds."""
    num_items: int
    """Number of items (and places) in the window."""

    @property
    def stop(self) -> int:
        """The place just after the last one of the window."""
        return self.start + self.num_items


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamPlan:
    """Order in which the items of a data set are visited.

    Raises:
        ValueError: if the data set holds no items.
    """

    shard_sizes: tuple[int, ...]
    """Number of items in every shard."""
    seed: int
    """Seed of the permutations."""
    window_size: int = 32_768
    """Number of items that complete a window: shards are added to it until it holds this many or the epoch ends."""

    def __post_init__(self) -> None:
        if self.num_items_per_epoch == 0:
            raise ValueError("the data set holds no items")

    @property
    def num_items_per_epoch(self) -> int:
        """Number of items in one epoch, which is the number of items in all shards."""
        return sum(self.shard_sizes)

    def windows(self, start: int, stop: int) -> Iterator[Window]:
        """Yield the windows that contain the places start … stop−1, in order."""
        epoch = start // self.num_items_per_epoch
        while epoch * self.num_items_per_epoch < stop:
            yield from (window for window in self.epoch(epoch) if window.stop > start and window.start < stop)
            epoch += 1

    def epoch(self, epoch: int) -> list[Window]:
        """Return the windows of one epoch, in order; windows without items are omitted."""
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
        """Return the shard numbers and the rows in them, each (n,), of n places, which must all lie in the window."""
        permutation, bounds = _window_order(self, window)
        chosen = permutation[np.asarray(places) - window.start]
        member = np.searchsorted(bounds, chosen, side="right") - 1
        return np.asarray(window.shards)[member], chosen - bounds[member]


@lru_cache(maxsize=4)
def _window_order(plan: StreamPlan, window: Window) -> tuple[np.ndarray, np.ndarray]:
    """Return the permutation of a window's items, and the index of each shard's first item in the unpermuted order."""
    permutation = np.random.default_rng([plan.seed, window.epoch, window.index]).permutation(window.num_items)
    sizes = [plan.shard_sizes[shard] for shard in window.shards]
    return permutation, np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int64)


def rank_places(start: int, stop: int, *, batch_size: int, rank: int, world_size: int) -> np.ndarray:
    """Return the places in start … stop−1 that belong to one rank.

    With B = batch_size and W = world_size, a rank gets slots rank·B/W … (rank+1)·B/W − 1 of every batch.
    """
    places = np.arange(start, stop)
    num_per_rank = batch_size // world_size
    slot = places % batch_size
    return places[slot // num_per_rank == rank]
