"""Tests that every token is predicted once and sees at least the promised context, wherever its window lies."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.scoring.temperatures.texts.windows import batches, windows_of


@st.composite
def sizes(draw: st.DrawFn) -> tuple[int, int, int]:
    context_length = draw(st.integers(1, 40))
    return draw(st.integers(0, 200)), context_length, draw(st.integers(1, context_length))


@given(sizes())
def test_each_position_is_new_once_and_sees_its_context(size: tuple[int, int, int]) -> None:
    num_tokens, context_length, stride = size
    windows = windows_of(7, num_tokens, context_length=context_length, stride=stride)
    assert [place for window in windows for place in range(window.first, window.stop)] == list(range(num_tokens))
    for window in windows:
        assert window.document == 7
        assert 0 <= window.start <= window.first < window.stop <= num_tokens
        assert window.num_positions <= context_length
        for place in range(window.first, window.stop):
            num_seen = place - window.start + 1  # Position i predicts token i + 1.
            assert num_seen >= min(place + 1, context_length - stride + 1)


@given(sizes(), st.integers(0, 200))
def test_a_document_cut_short_is_read_in_the_same_windows(size: tuple[int, int, int], num_kept: int) -> None:
    num_tokens, context_length, stride = size
    whole = windows_of(0, num_tokens, context_length=context_length, stride=stride)
    cut = windows_of(0, min(num_kept, num_tokens), context_length=context_length, stride=stride)
    assert [(window.start, window.first) for window in cut] == [
        (window.start, window.first) for window in whole if window.first < num_kept
    ]


@given(st.lists(st.integers(0, 100), max_size=20), st.integers(1, 7))
def test_batches_hold_every_window_once_and_similar_lengths_together(lengths: list[int], batch_size: int) -> None:
    windows = [
        window
        for number, length in enumerate(lengths)
        for window in windows_of(number, length, context_length=16, stride=5)
    ]
    groups = batches(windows, batch_size)
    assert sorted((w.document, w.start) for group in groups for w in group) == [(w.document, w.start) for w in windows]
    assert all(len(group) == batch_size for group in groups[:-1])
    in_order = [window.num_positions for group in groups for window in group]
    assert in_order == sorted(in_order, reverse=True)


@pytest.mark.parametrize("stride", [0, 17])
def test_a_stride_outside_the_context_is_refused(stride: int) -> None:
    with pytest.raises(ValueError, match=rf"stride = {stride} must lie in 1 … 16"):
        windows_of(0, 100, context_length=16, stride=stride)
