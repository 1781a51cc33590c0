"""Stored features of a prepared text: the last hidden states of a frozen model, with the targets they predict.

A block of T tokens with d numbers of bfloat16 each takes T·(2d + 4) + 8 bytes: hidden states, targets, and a digest of its
tokens. The files are those of `pipelines.feature_files`, and the order of training is that of the text.

Shapes: n blocks, T tokens in a block, d hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipelines import feature_files
from pipelines.feature_files import FILE_BYTES, Column, FeatureFiles, describe_bytes
from pipelines.storage import read_manifest, write_manifest
from pipelines.stream import Batch
from pipelines.text.blocks import without_end
from pipelines.text.manifest import Manifest
from pipelines.text.packing import PackingConfig

_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Features:
    """Description of the stored features of a text."""

    directory: str
    """Path or URI of the directory of the features."""
    text: Manifest
    """The prepared text, of packed blocks."""
    hidden_size: int
    """d, the number of numbers per token."""

    @property
    def context_length(self) -> int:
        """T, the number of tokens in a block."""
        assert isinstance(self.text.layout, PackingConfig)
        return self.text.layout.context_length

    @property
    def blocks(self) -> FeatureFiles:
        """The files, with a row for every block."""
        columns = (
            # NumPy has no bfloat16, so its bits are held as int16.
            Column(name="hidden", dtype=np.int16, shape=(self.context_length, self.hidden_size)),
            Column(name="targets", dtype=np.int32, shape=(self.context_length,)),
            Column(name="digest", dtype=np.int64),
        )
        return FeatureFiles(
            directory=self.directory,
            name="features",
            noun="blocks",
            shard_sizes=self.text.shard_sizes,
            columns=columns,
            rows_per_file=max(1, FILE_BYTES // sum(column.num_bytes for column in columns)),
        )

    @property
    def bytes_per_token(self) -> float:
        """Number of bytes per token."""
        return self.blocks.bytes_per_row / self.context_length

    def describe_size(self) -> str:
        """Return how much the features take, in total and per token."""
        num_tokens = self.text.num_rows * self.context_length
        return (
            f"{describe_bytes(self.blocks.num_bytes)}: {num_tokens:,} tokens × {self.bytes_per_token:,.0f} bytes "
            f"(hidden size {self.hidden_size} in bfloat16, and the target)"
        )

    def save(self, base_digest: str) -> None:
        """Write the manifest, whose presence marks the features as complete."""
        content = {
            "version": _VERSION,
            "features": {"hidden_size": self.hidden_size, "base_digest": base_digest},
            "text": self.text.directory,
            "text_digest": self.text.digest,
        }
        write_manifest(self.directory, content)

    @classmethod
    def load(cls, directory: str, text: Manifest) -> Features:
        """Read the manifest of features that were prepared for a text.

        Raises:
            FileNotFoundError: if the features are missing or not complete.
            ValueError: if they belong to another text or version.
        """
        content = read_manifest(directory, noun="features", field="features", version=_VERSION)
        if content["text_digest"] != text.digest:
            raise ValueError(f"{directory} holds the features of another text: prepare them again")
        return cls(directory=directory, text=text, hidden_size=content["features"]["hidden_size"])


def features_directory(root: str, text: Manifest, **settings: str | bool) -> str:
    """Return the directory of the features of a text.

    Args:
        root: directory or URI of prepared data.
        text: the prepared text.
        settings: what determines the hidden states: the digest of the model, its precision, and so on.
    """
    return feature_files.features_directory(root, _VERSION, text.digest, settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureSource:
    """Source of the stored features of blocks (see `pipelines.stream.Source`)."""

    features: Features
    """The features."""
    cache_bytes: int = 0
    """Size of the node's cache of remote files in bytes; 0: none."""
    end_is_target: bool = True
    """Whether the model is to predict the end-of-text token (see `pipelines.text.blocks.without_end`)."""

    def read(self, shards: np.ndarray, rows: np.ndarray, epoch: int) -> Batch:
        """Return `hidden` (n, T, d) int16 (bits of bfloat16), `targets` (n, T) and `digest` (n,) of n blocks.

        They do not depend on the epoch.
        """
        batch = self.features.blocks.read(shards, rows, cache_bytes=self.cache_bytes)
        batch = batch | {"targets": batch["targets"].astype(np.int64)}
        return batch if self.end_is_target else without_end(batch, self.features.text)

    def prefetch(self, now: Sequence[int], later: Sequence[int] = (), before: Sequence[int] = ()) -> None:
        """Fetch the files of shards into the node's cache in the background (see `pipelines.stream.RemoteSource`)."""
        feature_files.prefetch([self.features.blocks], self.cache_bytes, now, later, before)

    def name(self, shard: int, row: int) -> str:
        """Return the file of the text and the row in it, for messages."""
        return f"{self.features.text.shards[shard].file}:{row}"


def read_feature_range(features: Features, start: int, stop: int) -> Batch:
    """Read the features of blocks start … stop−1 in stored order, for validation."""
    return FeatureSource(features=features).read(*features.blocks.places(start, stop), 0)
