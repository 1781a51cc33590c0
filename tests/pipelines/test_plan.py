"""The order of training data: every block once an epoch, the same for any number of workers, and resumable anywhere."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.plan import StreamPlan, rank_places

shards_of_parts = st.lists(st.lists(st.integers(0, 40), max_size=5), min_size=1, max_size=6).filter(
    lambda parts: sum(map(sum, parts)) > 0
)
plans = st.builds(
    lambda parts, is_grouped, seed, window_size: StreamPlan(
        shard_sizes=tuple(size for part in parts for size in part),
        part_sizes=tuple(map(len, parts)) if is_grouped else (),
        seed=seed,
        window_size=window_size,
    ),
    parts=shards_of_parts,
    is_grouped=st.booleans(),
    seed=st.integers(0, 1000),
    window_size=st.integers(1, 100),
)


def order(plan: StreamPlan, start: int, stop: int) -> list[tuple[int, int]]:
    """Return (shard, row) at every place, read window by window as the stream does."""
    blocks = []
    for window in plan.windows(start, stop):
        places = np.arange(max(start, window.start), min(stop, window.stop))
        shards, rows = plan.locate(window, places)
        blocks += list(zip(shards.tolist(), rows.tolist(), strict=True))
    return blocks


@given(plan=plans)
def test_every_epoch_visits_every_block_once(plan: StreamPlan) -> None:
    every = {(shard, row) for shard, size in enumerate(plan.shard_sizes) for row in range(size)}
    size = plan.num_items_per_epoch
    for epoch in range(3):
        visited = order(plan, epoch * size, (epoch + 1) * size)
        assert len(visited) == size
        assert set(visited) == every


@given(plan=plans, seed=st.integers(0, 1000))
def test_a_window_depends_on_no_part_after_its_own(plan: StreamPlan, seed: int) -> None:
    """Shards of parts that come later may have any size; the windows before them stay the same."""
    part_sizes = plan.part_sizes or (1,) * len(plan.shard_sizes)
    first_shards = np.cumsum([0, *part_sizes])
    visited = plan.order_parts(0)
    num_known = seed % len(visited)
    sizes = list(plan.shard_sizes)
    for part in visited[num_known:]:
        for shard in range(first_shards[part], first_shards[part + 1]):
            sizes[shard] += 7
    other = replace(plan, shard_sizes=tuple(sizes))
    known = {shard for part in visited[:num_known] for shard in range(first_shards[part], first_shards[part + 1])}
    for window, changed in zip(plan.epoch(0, 0), other.epoch(0, 0), strict=False):
        if not known.issuperset(window.shards) or not known.issuperset(changed.shards):
            break
        assert window == changed
        places = np.arange(window.start, window.stop)
        for mine, others in zip(plan.locate(window, places), other.locate(changed, places), strict=True):
            assert np.array_equal(mine, others)


@given(plan=plans, cut=st.integers(0, 200), length=st.integers(0, 200))
def test_a_stream_continued_anywhere_is_the_same_stream(plan: StreamPlan, cut: int, length: int) -> None:
    assert order(plan, 0, cut) + order(plan, cut, cut + length) == order(plan, 0, cut + length)


@given(
    start=st.integers(0, 50),
    length=st.integers(0, 300),
    world_size=st.sampled_from([1, 2, 4, 8]),
    per=st.integers(1, 4),
)
def test_ranks_share_every_batch_in_order(start: int, length: int, world_size: int, per: int) -> None:
    batch_size = world_size * per
    parts = [
        rank_places(start, start + length, batch_size=batch_size, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    assert sorted(np.concatenate(parts).tolist()) == list(range(start, start + length))
    for rank, part in enumerate(parts):
        assert (part % batch_size // per == rank).all()
        assert (np.diff(part) > 0).all()


@pytest.mark.parametrize(("shard_sizes", "window_size"), [((50, 70, 30), 60), ((1,) * 100, 1)])
def test_epochs_and_seeds_differ_in_windows_and_between_them(shard_sizes: tuple[int, ...], window_size: int) -> None:
    plan = StreamPlan(shard_sizes=shard_sizes, seed=0, window_size=window_size)
    size = sum(shard_sizes)
    first, second = order(plan, 0, size), order(plan, size, 2 * size)
    other = order(replace(plan, seed=1), 0, size)
    for a, b in ((first, second), (first, other)):
        assert sum(x == y for x, y in zip(a, b, strict=True)) < size / 4
    assert order(plan, 0, size) == first


def test_the_shuffle_is_uniform_inside_a_window() -> None:
    """The places of block 0 over many seeds pass a chi-square test."""
    size, num_seeds = 20, 2000
    counts = np.zeros(size)
    for seed in range(num_seeds):
        counts[order(StreamPlan(shard_sizes=(12, 8), seed=seed), 0, size).index((0, 0))] += 1
    chi_square = ((counts - num_seeds / size) ** 2 / (num_seeds / size)).sum()
    assert chi_square < 43.8  # 99.9 % quantile with 19 degrees of freedom


def test_no_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="holds no items"):
        StreamPlan(shard_sizes=(0, 0), seed=0)
