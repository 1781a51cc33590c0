"""Compute the order of training data, a pure function of (seed, manifest): which item is at which place of the stream.

The stream is the infinite sequence epoch 0, epoch 1, …; each epoch visits every item exactly once. A *place* is an
index into the stream. With B items per batch, batch k consists of places kB … (k+1)B−1. Batches may cross the end of
an epoch, so no item is dropped and the order does not depend on the number of workers. In each epoch the parts of the
data (such as groups of members of a tar) are permuted, so are the shards within a part, and they are grouped into windows
in this order, within which the items are permuted: a reader needs only one window at a time. A window depends on no part
after its own, so that training can start while later parts are still being prepared.

The cursor of a run, which is all that is needed to resume it, is a single number: the next place.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import ClassVar

import numpy as np

_WITHIN_PART = 0x70617274


@dataclass(frozen=True, slots=True, kw_only=True)
class ShuffleWindow:
    """Contiguous range of places whose items all lie in a few shards."""

    epoch: int
    """Epoch that the window belongs to, counted from 0."""
    index: int
    """Number of the window within its epoch, counted from 0."""
    start: int
    """First place of the window in the stream."""
    shards: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def num_items(self) -> int:
        """Number of items (and places) in the window."""
        return sum(self.sizes)

    @property
    def stop(self) -> int:
        """The place just after the last one of the window."""
        return self.start + self.num_items


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamPlan:
    """Order in which the items of a data set are visited."""

    shard_sizes: tuple[int, ...]
    seed: int
    window_size: int = 32_768
    """Number of items that complete a window: shards are added to it until it holds this many or the epoch ends."""
    part_sizes: tuple[int, ...] = ()
    """Number of shards in every part, whose shards are consecutive. If empty, every shard is a part of its own."""
    is_growing: ClassVar[bool] = False
    """Whether the sizes of parts become known one after the other, so that a window may have to be waited for."""
    identity: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Hashes by which other data are recognised. What is not known yet of data that are still being prepared is absent."""

    def __post_init__(self) -> None:
        assert not self.part_sizes or sum(self.part_sizes) == len(self.shard_sizes)
        if self.num_items_per_epoch == 0:
            raise ValueError("the data set holds no items")

    @property
    def num_items_per_epoch(self) -> int | None:
        """Number of items in one epoch, which is the number of items in all shards; None if it is not known yet."""
        return sum(self.shard_sizes)

    @property
    def order_version(self) -> int:
        """Version of the rule that makes the order: 1 if every shard is a part of its own, else 2."""
        return 2 if self.part_sizes else 1

    @property
    def num_parts(self) -> int:
        """Number of parts."""
        return len(self.part_sizes) or len(self.shard_sizes)

    def part(self, number: int) -> Sequence[tuple[int, int]]:
        """Return the number and the size of each shard of a part."""
        if not self.part_sizes:
            return [(number, self.shard_sizes[number])]
        first = _first_shards(self.part_sizes)[number]
        return list(enumerate(self.shard_sizes[first : first + self.part_sizes[number]], start=first))

    def windows(self, start: int, stop: int) -> Iterator[ShuffleWindow]:
        """Yield the windows that contain the places start … stop−1, in order."""
        epoch, first = 0, 0
        if size := self.num_items_per_epoch:
            epoch = start // size
            first = epoch * size
        while first < stop:
            for window in self.epoch(epoch, first):
                if window.start >= stop:
                    return
                if window.stop > start:
                    yield window
            assert self.num_items_per_epoch  # Known at the latest when the first epoch has ended.
            first += self.num_items_per_epoch
            epoch += 1

    def epoch(self, epoch: int, first: int) -> Iterator[ShuffleWindow]:
        """Yield the windows of one epoch, whose first place is `first`, in order; windows without items are omitted."""
        group: list[tuple[int, int]] = []
        index = num_items = 0
        for shard, size in self._order(epoch):
            group.append((shard, size))
            num_items += size
            if num_items >= self.window_size:
                yield _make_window(epoch, index, first, group)
                first += num_items
                index += 1
                group, num_items = [], 0
        if num_items:
            yield _make_window(epoch, index, first, group)

    def order_parts(self, epoch: int) -> list[int]:
        """Return the numbers of the parts in the order in which an epoch visits them."""
        return np.random.default_rng([self.seed, epoch]).permutation(self.num_parts).tolist()

    def _order(self, epoch: int) -> Iterator[tuple[int, int]]:
        """Yield the number and the size of every shard in the order in which an epoch visits them."""
        for number in self.order_parts(epoch):
            shards = self.part(number)
            if len(shards) > 1:
                # The number of integers keeps this generator distinct from those of epochs and windows.
                order = np.random.default_rng([self.seed, epoch, number, _WITHIN_PART]).permutation(len(shards))
                shards = [shards[at] for at in order]
            yield from shards

    def cache_need(self, shard_bytes: Sequence[int]) -> int:
        """Return the size of a cache that holds the largest window of the first epoch, in bytes.

        Args:
            shard_bytes: size of every shard in bytes.
        """
        return max(sum(shard_bytes[shard] for shard in window.shards) for window in self.epoch(0, 0))

    def locate(self, window: ShuffleWindow, places: Sequence[int] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the shard numbers and the rows in them, each (n,), of n places, which must all lie in the window."""
        permutation, bounds = _window_order(self.seed, window)
        chosen = permutation[np.asarray(places) - window.start]
        member = np.searchsorted(bounds, chosen, side="right") - 1
        return np.asarray(window.shards)[member], chosen - bounds[member]


@lru_cache(maxsize=4)
def _first_shards(part_sizes: tuple[int, ...]) -> list[int]:
    """Return the number of the first shard of every part."""
    return [0, *itertools.accumulate(part_sizes)]


def _make_window(epoch: int, index: int, start: int, group: Sequence[tuple[int, int]]) -> ShuffleWindow:
    shards, sizes = zip(*group, strict=True)
    return ShuffleWindow(epoch=epoch, index=index, start=start, shards=shards, sizes=sizes)


@lru_cache(maxsize=4)
def _window_order(seed: int, window: ShuffleWindow) -> tuple[np.ndarray, np.ndarray]:
    """Return the permutation of a window's items, and the index of each shard's first item in the unpermuted order."""
    permutation = np.random.default_rng([seed, window.epoch, window.index]).permutation(window.num_items)
    return permutation, np.concatenate([[0], np.cumsum(window.sizes)[:-1]]).astype(np.int64)


def rank_places(start: int, stop: int, *, batch_size: int, rank: int, world_size: int) -> np.ndarray:
    """Return the places in start … stop−1 that belong to one rank.

    With B = batch_size and W = world_size, a rank gets slots rank·B/W … (rank+1)·B/W − 1 of every batch.
    """
    places = np.arange(start, stop)
    num_per_rank = batch_size // world_size
    slot = places % batch_size
    return places[slot // num_per_rank == rank]
