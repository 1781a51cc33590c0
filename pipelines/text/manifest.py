"""What a prepared data set holds: its shards with counts and digests, where they came from, and what was wrong."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from pipelines.storage import read_json, resolve, write_json
from pipelines.text.documents import DocumentConfig
from pipelines.text.packing import PackingConfig

MANIFEST_FILE = "manifest.json"
FORMAT_VERSION = 3

Layout = PackingConfig | DocumentConfig
"""How documents become the rows of shards."""

_LAYOUTS: dict[str, type[PackingConfig] | type[DocumentConfig]] = {
    layout.kind: layout for layout in (PackingConfig, DocumentConfig)
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardEntry:
    """One file of rows."""

    file: str
    """Its name, relative to the manifest."""
    archive: str
    """The archive that its documents came from."""
    num_rows: int
    """Blocks or documents."""
    num_tokens: int
    """In documents, their tokens; in blocks the targets: tokens plus one end a document that ends here."""
    digest: str
    """blake2b of the stored tokens and the rows' lengths."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveEntry:
    """What was read from one archive, and what was not."""

    path: str
    num_bytes: int
    num_documents: int
    problems: dict[str, int]
    """Problem kind → records (or archives) that it cost."""
    examples: list[str]
    """Where the first few problems are."""
    shards: list[ShardEntry]

    @property
    def num_records(self) -> int:
        """What the share of problems is a share of."""
        return self.num_documents


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A prepared data set; read it with :meth:`load`."""

    directory: str
    """The URI that shard names are relative to."""
    tokenizer_digest: str
    layout: Layout
    archives: list[ArchiveEntry]
    version: int = FORMAT_VERSION

    @cached_property
    def shards(self) -> list[ShardEntry]:
        """All shards, in the order of the archives."""
        return [shard for archive in self.archives for shard in archive.shards]

    @property
    def shard_sizes(self) -> tuple[int, ...]:
        """Rows of every shard."""
        return tuple(shard.num_rows for shard in self.shards)

    @cached_property
    def num_rows(self) -> int:
        """Blocks or documents in all shards."""
        return sum(shard.num_rows for shard in self.shards)

    @cached_property
    def num_tokens(self) -> int:
        """As the shards count them."""
        return sum(shard.num_tokens for shard in self.shards)

    @cached_property
    def num_documents(self) -> int:
        """Documents that were read."""
        return sum(archive.num_documents for archive in self.archives)

    @cached_property
    def problems(self) -> Counter[str]:
        """Problem kind → number, over all archives."""
        return sum((Counter(archive.problems) for archive in self.archives), Counter())

    @cached_property
    def digest(self) -> str:
        """16 hex digits over the shards: equal digests mean equal rows in equal order."""
        content = json.dumps([self.layout.label, [shard.digest for shard in self.shards]])
        return hashlib.blake2b(content.encode(), digest_size=8).hexdigest()

    def save(self) -> None:
        """Write the manifest into its directory; its presence says that the directory is complete."""
        content = {key: value for key, value in asdict(self).items() if key != "directory"}
        content |= {"layout": {"kind": self.layout.kind, **content["layout"]}, "digest": self.digest}
        write_json(f"{self.directory}/{MANIFEST_FILE}", content)

    @classmethod
    def load(cls, directory: str) -> Manifest:
        """Read the manifest of a prepared directory.

        Raises:
            FileNotFoundError: if there is none.
            ValueError: if another version wrote it.
        """
        content = read_json(f"{directory}/{MANIFEST_FILE}")
        if content is None:
            raise FileNotFoundError(f"{directory} holds no {MANIFEST_FILE}: it is not a (completely) prepared data set")
        if content["version"] != FORMAT_VERSION:
            raise ValueError(
                f"{directory} has manifest version {content['version']}, this program reads {FORMAT_VERSION}"
            )
        return cls(
            directory=directory,
            tokenizer_digest=content["tokenizer_digest"],
            layout=_LAYOUTS[content["layout"].pop("kind")](**content["layout"]),
            archives=[archive_from_json(entry) for entry in content["archives"]],
        )


def archive_from_json(values: dict[str, Any]) -> ArchiveEntry:
    """The inverse of `dataclasses.asdict` for an ArchiveEntry."""
    return ArchiveEntry(**{**values, "shards": [ShardEntry(**shard) for shard in values["shards"]]})


def read_rows(manifest: Manifest, shard: ShardEntry, rows: Sequence[int] | np.ndarray) -> pa.Table:
    """The given rows of one shard, in the given order; a local shard is memory-mapped, a remote one read whole."""
    filesystem, path = resolve(f"{manifest.directory}/{shard.file}")
    is_local = filesystem.type_name == "local"
    with pa.memory_map(path) if is_local else filesystem.open_input_file(path) as source:
        table = pa.ipc.open_file(source).read_all()
        if table.num_rows != shard.num_rows:
            raise OSError(f"{path} holds {table.num_rows} rows, its manifest says {shard.num_rows}: prepare it again")
        return table.take(pa.array(rows, pa.int64()))
