"""Manifest of a prepared text data set: its shards with counts and digests, their archives, and problems in reading."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from pipelines.archives import Archive
from pipelines.plan import StreamPlan
from pipelines.problems import lost_name
from pipelines.storage import compute_digest, read_manifest, write_manifest
from pipelines.text.packing import DocumentConfig, PackingConfig
from pipelines.text.windows import WindowConfig

FORMAT_VERSION = 4
_MAX_ROWS_PER_PART = 2**32

Layout = PackingConfig | DocumentConfig
"""Configuration of how documents become rows of shards: packed into blocks, cut or as whole windows, or one per row."""

_LAYOUTS: dict[str, type[PackingConfig] | type[DocumentConfig]] = {
    layout.kind: layout for layout in (PackingConfig, WindowConfig, DocumentConfig)
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardEntry:
    """One shard, which is an Arrow file of rows."""

    file: str
    """Name of the file, relative to the manifest."""
    archive: str
    num_rows: int
    num_tokens: int
    """Number of tokens for rows that are documents. For blocks it is the number of targets: the documents' tokens
    plus one end-of-text token for each document that ends in the shard; for windows that of the positions that are read."""
    digest: str
    """blake2b hash of the stored tokens and the lengths of the rows."""
    part: int = 0
    """Number of the part of the archive that the documents come from (`pipelines.text.reading.Part`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveEntry:
    """Summary of reading one archive: its documents, its shards, and its problems."""

    path: str
    num_bytes: int
    num_documents: int
    problems: dict[str, int]
    examples: list[str]
    shards: list[ShardEntry]
    num_parts: int = 1
    num_bytes_unread: int | None = None
    """Number of bytes behind the places where it could not be read further (`pipelines.problems.Problem`)."""
    version: str = ""
    """What changes when the archive is written again (`pipelines.object_store.version_of`); empty if it is not known."""

    @property
    def num_records(self) -> int:
        """Number of readable records (documents), which `check_problems` compares the problems with."""
        return self.num_documents


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Description of a prepared data set; use :meth:`load` to read it."""

    directory: str
    tokenizer_digest: str
    """Digest of the tokenizer (see `pipelines.text.tokenization.tokenizer_digest`)."""
    layout: Layout
    archives: list[ArchiveEntry]
    version: int = FORMAT_VERSION
    not_read: list[str] = field(default_factory=list, compare=False)
    """Names of the files of the source that were not read when the data were last asked for; they are not stored."""

    @property
    def readings(self) -> Sequence[ArchiveEntry]:
        """Summaries of everything that was read, for `check_problems`."""
        return self.archives

    @property
    def lost_files(self) -> list[str]:
        """Names of the files that list the lost records, in stored order."""
        prepared: list[str] = []
        for number, archive in enumerate(self.archives):
            prepared += [part_name(number, part) for part in range(archive.num_parts)]
            if "unread_document" in archive.problems or (archive.num_parts > 1 and "empty_archive" in archive.problems):
                prepared.append(archive_name(number))
        return [lost_name(name) for name in prepared]

    @cached_property
    def shards(self) -> list[ShardEntry]:
        """All shards, in the order of the archives."""
        return [shard for archive in self.archives for shard in archive.shards]

    def shard(self, number: int) -> ShardEntry:
        """Return a shard (see `pipelines.text.growing.GrowingManifest.shard`)."""
        return self.shards[number]

    @property
    def shard_sizes(self) -> tuple[int, ...]:
        """Number of rows of every shard, for a `StreamPlan`."""
        return tuple(shard.num_rows for shard in self.shards)

    @property
    def part_sizes(self) -> tuple[int, ...]:
        """Number of shards of every part of the archives, for a `StreamPlan`."""
        counts = [Counter(shard.part for shard in archive.shards) for archive in self.archives]
        return tuple(
            count[part]
            for archive, count in zip(self.archives, counts, strict=True)
            for part in range(archive.num_parts)
        )

    def plan(self, *, seed: int, window_size: int) -> StreamPlan:
        """Return the order in which training visits the rows."""
        return StreamPlan(
            shard_sizes=self.shard_sizes,
            part_sizes=self.part_sizes,
            seed=seed,
            window_size=window_size,
            identity={"archives": archives_digest(self.layout, self.archives), "rows": self.digest},
        )

    @cached_property
    def num_rows(self) -> int:
        """Number of rows (blocks or documents) in all shards."""
        return sum(shard.num_rows for shard in self.shards)

    @cached_property
    def num_tokens(self) -> int:
        """Number of tokens in all shards, as defined by `ShardEntry.num_tokens`."""
        return sum(shard.num_tokens for shard in self.shards)

    @cached_property
    def num_documents(self) -> int:
        """Number of documents that were read, including any that the layout left out."""
        return sum(archive.num_documents for archive in self.archives)

    @cached_property
    def problems(self) -> Counter[str]:
        """Number of lost records by kind of problem, over all archives."""
        return sum((Counter(archive.problems) for archive in self.archives), Counter())

    @cached_property
    def digest(self) -> str:
        """Hash of all shards as 16 hex digits; equal digests mean equal rows in equal order."""
        return compute_digest([self.layout.label, [shard.digest for shard in self.shards]])

    def save(self) -> None:
        """Write the manifest to its directory; the presence of this file marks the directory as complete."""
        content = {key: value for key, value in asdict(self).items() if key not in ("directory", "not_read")}
        content |= {"layout": {"kind": self.layout.kind, **content["layout"]}, "digest": self.digest}
        write_manifest(self.directory, content)

    def latest(self) -> Manifest:
        """Return this manifest, which is complete (see `pipelines.text.growing.GrowingManifest.latest`)."""
        return self

    def row_keys(self, shards: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Return the keys (see `make_row_keys`) of n rows, given their shards and their rows in them, each (n,)."""
        parts, first_rows = self._parts_of_shards
        return make_row_keys(parts[shards], first_rows[shards] + rows)

    @cached_property
    def _parts_of_shards(self) -> tuple[np.ndarray, np.ndarray]:
        """The number of every shard's part, and the number of rows of that part before the shard: both (shards,)."""
        parts = np.repeat(np.arange(len(self.part_sizes)), self.part_sizes)
        before = np.cumsum([0, *self.shard_sizes])[:-1]
        return parts, before - before[np.searchsorted(parts, parts)]

    @classmethod
    def load(cls, directory: str) -> Manifest:
        """Read a manifest; FileNotFoundError if there is none, ValueError if of another version, or of images."""
        content = read_manifest(directory, noun="text", field="archives", version=FORMAT_VERSION)
        return cls(
            directory=directory,
            tokenizer_digest=content["tokenizer_digest"],
            layout=_LAYOUTS[content["layout"].pop("kind")](**content["layout"]),
            archives=[archive_from_json(entry) for entry in content["archives"]],
        )


def archives_digest(layout: Layout, archives: Sequence[Archive | ArchiveEntry]) -> str:
    """Return a hash, as 16 hex digits, of what is known of a text before it is read: layout and sizes of archives."""
    return compute_digest([layout.label, [archive.num_bytes for archive in archives]])


def part_name(archive: int, part: int) -> str:
    """Return the name of a part, by the number of its archive and its own number within the archive."""
    return f"part-{archive:05d}-{part:05d}"


def archive_name(archive: int) -> str:
    """Return the name of what is stored of an archive as a whole, by its number."""
    return f"archive-{archive:05d}"


def make_row_keys(parts: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return distinct int64 keys of rows, given the part that each belongs to and its number within the part, each (n,).

    They are known as soon as the part is prepared, unlike the number of a row among all rows, which they equal in the first
    part.
    """
    return parts * _MAX_ROWS_PER_PART + rows


def archive_from_json(values: dict[str, Any]) -> ArchiveEntry:
    """Create an ArchiveEntry from a dictionary; the inverse of `dataclasses.asdict`."""
    return ArchiveEntry(**{**values, "shards": [ShardEntry(**shard) for shard in values["shards"]]})
