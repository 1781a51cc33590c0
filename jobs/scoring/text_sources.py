"""Texts for a language model: the files that hold them, and the length of the windows that it reads.

How a document longer than the context is read is said in `pipelines.text.windows`.
"""

from __future__ import annotations

import logging

from pyarrow.fs import FileType
from transformers import PretrainedConfig

from pipelines.archives import PLAIN_SUFFIXES, SUFFIXES, Archive, describe_not_read, list_source, resolve_source
from pipelines.storage import relative, resolve
from pipelines.text.windows import default_stride

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
        listing = list_source(uri, SUFFIXES | PLAIN_SUFFIXES)  # the directory has no archives, but it may have plain texts
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
