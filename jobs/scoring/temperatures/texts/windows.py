"""Windows: how a document longer than the model's context is read, so that every token is predicted exactly once.

A document of n tokens t1 … tn is the stream [bos] t1 … tn. Reading stream positions 0 … n−1 gives the predictions of t1
… tn; position i predicts t(i+1). With a context of C positions and a stride of S, window k reads positions k·S … k·S +
C − 1, and contributes the predictions that no earlier window has made: all C of the first window, the last S of every
other. So every token but the first C is predicted from at least C − S + 1 preceding tokens. The positions of the
windows do not depend on n: a truncated document gets the same predictions up to its end.

Windows are read without adding a bos: only the first one starts with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Stream positions start … stop − 1 of a document; the positions from `first` on make new predictions."""

    document: int
    start: int
    first: int
    stop: int

    @property
    def num_positions(self) -> int:
        """Number of positions that the model reads."""
        return self.stop - self.start


def windows_of(document: int, num_tokens: int, *, context_length: int, stride: int) -> list[Window]:
    """Returns the windows of one document, in order; a document without tokens has none.

    Raises:
        ValueError: if the stride is not in 1 … context_length.
    """
    if not 1 <= stride <= context_length:
        raise ValueError(f"stride = {stride} must lie in 1 … {context_length}, the context length")
    windows: list[Window] = []
    num_predicted = 0
    while num_predicted < num_tokens:
        start = len(windows) * stride
        stop = min(start + context_length, num_tokens)
        windows.append(Window(document=document, start=start, first=num_predicted, stop=stop))
        num_predicted = stop
    return windows


def batches(windows: Sequence[Window], batch_size: int) -> list[list[Window]]:
    """Returns the windows in batches of similar length, longest first, so that batches contain little padding."""
    ordered = sorted(windows, key=lambda window: -window.num_positions)
    return [ordered[start : start + batch_size] for start in range(0, len(ordered), batch_size)]
