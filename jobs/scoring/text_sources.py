"""Texts for a language model: the files that hold them, and the length of the windows that it reads.

How a document longer than the context is read is said in `pipelines.text.windows`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from pyarrow.fs import FileType
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedTokenizerFast

from jobs.engine.export import model_digest
from jobs.engine.fields import absolute_path
from jobs.scoring.headroom.config import Headroom
from jobs.scoring.temperatures.config import PredictTemperaturesConfig
from pipelines.archives import PLAIN_SUFFIXES, SUFFIXES, Archive, describe_not_read, list_source, resolve_source
from pipelines.storage import relative, resolve
from pipelines.text.tokenization import document_start_id, tokenizer_digest
from pipelines.text.windows import ReadingWindow, batches, default_stride, windows_of

logger = logging.getLogger(__name__)


def list_sources(uri: str) -> list[Archive]:
    """Returns the files to read.

    These are the plain text file or archive at the path or URI, or a directory's archives, or, if it has none, its
    plain text files. A warning names the other files of the directory.

    Raises:
        FileNotFoundError, ValueError: as `list_archives`.
    """
    filesystem, root = resolve(uri)
    is_directory = filesystem.get_file_info(root).type == FileType.Directory
    try:
        listing = list_source(uri, SUFFIXES if is_directory else SUFFIXES | PLAIN_SUFFIXES)
    except FileNotFoundError:
        if not is_directory:
            raise
        listing = list_source(
            uri, SUFFIXES | PLAIN_SUFFIXES
        )  # the directory has no archives, but it may have plain texts
    if listing.not_read:
        logger.warning("%s%s", uri, describe_not_read(listing.not_read))
    return listing.archives


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
    stride = stride or default_stride(length)
    if stride > length:
        raise ValueError(f"stride = {stride} must lie in 1 … {length}, the context length")
    return length, stride


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSettings:
    """How a text is read for a model. Local paths are absolute, because a worker has its own working directory."""

    format_version: ClassVar[int] = 1
    """Increased whenever the same settings would make other tables."""
    source: str
    model: str
    text_field: str
    max_documents: int
    part_characters: int
    context_length: int
    stride: int
    batch_size: int
    precision: Literal["fp32", "bf16", "int8", "fp8"]
    bos_id: int
    model_digest: str
    tokenizer_digest: str

    def record(self, archives: list[Archive]) -> dict[str, Any]:
        """Returns everything that decides the tables, as a flat mapping, without file locations and the batch size."""
        left_out = ("source", "model", "tempnet", "batch_size", "known_text")
        values = {name: value for name, value in asdict(self).items() if name not in left_out}
        return {"version": self.format_version, **values, **archive_sizes(self.source, archives)}


def text_options(
    config: PredictTemperaturesConfig | Headroom, tokenizer: PreTrainedTokenizerFast, base: PretrainedConfig
) -> dict[str, Any]:
    """Returns the fields of `TextSettings` for a configuration, its tokenizer and its model's configuration.

    Raises:
        ValueError: if the windows do not fit the model.
    """
    context_length, stride = choose_windows(config.model, base, config.context_length, config.stride)
    names = ("text_field", "max_documents", "part_characters", "batch_size", "precision")
    return {
        **{name: getattr(config, name) for name in names},
        "source": absolute_path(config.text),
        "model": absolute_path(config.model),
        "context_length": context_length,
        "stride": stride,
        "bos_id": document_start_id(tokenizer),
        "model_digest": model_digest(config.model),
        "tokenizer_digest": tokenizer_digest(tokenizer),
    }


def read_in_batches(
    documents: Sequence[np.ndarray], settings: TextSettings
) -> Iterator[tuple[list[ReadingWindow], Tensor, Tensor, Tensor]]:
    """Yields the windows of documents (n,) in batches, with what a model reads; padding is on the right.

    Yields:
        the B windows of a batch; the tokens (B, T) and the token after each of them (B, T), int64; and whether (B, T) a
        position makes a new prediction.
    """
    streams = [torch.from_numpy(np.concatenate([[settings.bos_id], ids]).astype(np.int64)) for ids in documents]
    windows = [
        window
        for number, ids in enumerate(documents)
        for window in windows_of(number, len(ids), context_length=settings.context_length, stride=settings.stride)
    ]
    for batch in batches(windows, settings.batch_size):
        shape = len(batch), max(window.num_positions for window in batch)
        input_ids, targets = torch.full(shape, settings.bos_id), torch.zeros(shape, dtype=torch.long)
        is_new = torch.zeros(shape, dtype=torch.bool)
        for row, window in enumerate(batch):
            stream, stop = streams[window.document], window.num_positions
            input_ids[row, :stop] = stream[window.start : window.stop]
            targets[row, :stop] = stream[window.start + 1 : window.stop + 1]
            is_new[row, window.first - window.start : stop] = True
        yield batch, input_ids, targets, is_new
