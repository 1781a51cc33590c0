"""Texts for a language model: the files that hold them, and how a document longer than the context is read.

A document of n tokens t1 … tn is the stream [bos] t1 … tn. Reading stream positions 0 … n−1 gives the predictions of t1
… tn; position i predicts t(i+1). With a context of C positions and a stride of S, window k reads positions k·S … k·S +
C − 1, and contributes the predictions that no earlier window has made: all C of the first window, the last S of every
other. So every token but the first C is predicted from at least C − S + 1 preceding tokens. The positions of the
windows do not depend on n: a truncated document gets the same predictions up to its end. Windows are read without adding
a bos: only the first one starts with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pyarrow.fs import FileType
from transformers import PretrainedConfig

from pipelines.archives import PLAIN_SUFFIXES, SUFFIXES, Archive, list_archives, resolve_source
from pipelines.storage import relative, resolve


def list_sources(uri: str) -> list[Archive]:
    """Returns the files to read.

    These are the plain text file or archive at the path or URI, or a directory's archives, or, if it has none, its
    plain text files.

    Raises:
        FileNotFoundError, ValueError: as `list_archives`.
    """
    filesystem, root = resolve(uri)
    if filesystem.get_file_info(root).type == FileType.Directory:
        try:
            return list_archives(uri)
        except FileNotFoundError:  # the directory has no archives, but it may have plain texts
            pass
    return list_archives(uri, SUFFIXES | PLAIN_SUFFIXES)


def archive_sizes(source: str, archives: list[Archive]) -> dict[str, int]:
    """Returns the size in bytes of every archive, by a name that holds its place in the source."""
    root = resolve_source(source)[1]
    return {f"archive {relative(archive.path, root)} (bytes)": archive.num_bytes for archive in archives}


def choose_windows(model: str, base: PretrainedConfig, context_length: int, stride: int) -> tuple[int, int]:
    """Returns the length of a model's windows and the tokens between their starts, each as given or, for 0, its default.

    Raises:
        ValueError: if one of them does not fit, or the model does not say how long its windows may be.
    """
    longest = getattr(base, "max_position_embeddings", None)
    length = context_length or longest
    if length is None:
        raise ValueError(f"{model} does not say how many positions it reads: context_length is needed")
    if longest is not None and length > longest:
        raise ValueError(f"context_length = {length} must lie in 1 … {longest}, the positions of {model}")
    stride = stride or max(1, length // 2)
    if stride > length:
        raise ValueError(f"stride = {stride} must lie in 1 … {length}, the context length")
    return length, stride


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadingWindow:
    """Stream positions start … stop − 1 of a document; the positions from `first` on make new predictions."""

    document: int
    start: int
    first: int
    stop: int

    @property
    def num_positions(self) -> int:
        """Number of positions that the model reads."""
        return self.stop - self.start


def windows_of(document: int, num_tokens: int, *, context_length: int, stride: int) -> list[ReadingWindow]:
    """Returns the windows of one document, in order; a document without tokens has none.

    Raises:
        ValueError: if the stride is not in 1 … context_length.
    """
    if not 1 <= stride <= context_length:
        raise ValueError(f"stride = {stride} must lie in 1 … {context_length}, the context length")
    windows: list[ReadingWindow] = []
    num_predicted = 0
    while num_predicted < num_tokens:
        start = len(windows) * stride
        stop = min(start + context_length, num_tokens)
        windows.append(ReadingWindow(document=document, start=start, first=num_predicted, stop=stop))
        num_predicted = stop
    return windows


def batches(windows: Sequence[ReadingWindow], batch_size: int) -> list[list[ReadingWindow]]:
    """Returns the windows in batches of similar length, longest first, so that batches contain little padding."""
    ordered = sorted(windows, key=lambda window: -window.num_positions)
    return [ordered[start : start + batch_size] for start in range(0, len(ordered), batch_size)]
