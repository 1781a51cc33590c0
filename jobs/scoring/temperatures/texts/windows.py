"""Windows: how a document that is longer than the model's context is read, so that every token is predicted once.

A document of n tokens t1 … tn is the stream [bos] t1 … tn. Reading stream positions 0 … n−1 gives the predictions of
t1 … tn; position i predicts t(i+1). With a context of C positions and a stride of S, window k reads positions
k·S … k·S + C − 1, and of these the predictions that no window before it has made: all C of the first window, the last S
of every other. So every token but the first C is predicted from at least C − S + 1 tokens before it. Where the windows lie
does not depend on n: a document cut short gets the same predictions as far as it goes.

A window is read as it is, without a bos of its own: only the first one starts with bos.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Stream positions start … stop − 1 of a document; those from `first` on predict tokens that are new."""

    document: int
    start: int
    first: int
    stop: int

    @property
    def num_positions(self) -> int:
        """Positions that the model reads."""
        return self.stop - self.start


def windows_of(document: int, num_tokens: int, *, context_length: int, stride: int) -> list[Window]:
    """The windows of one document, in order; none for a document without tokens.

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
    """The windows in batches of about equal length (longest first), so that little of a batch is padding."""
    ordered = sorted(windows, key=lambda window: -window.num_positions)
    return [ordered[start : start + batch_size] for start in range(0, len(ordered), batch_size)]
