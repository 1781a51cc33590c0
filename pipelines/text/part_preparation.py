"""Prepare one part of a text archive: read its documents, tokenise them, and write them as shards of rows.

A part depends on nothing but its own bytes, so that parts can be prepared in any order, by any number of tasks, and
again after an interruption, with the same result.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
from tokenizers import Tokenizer

from pipelines.archives import Archive
from pipelines.losses import Losses, losses_name
from pipelines.parts import WHOLE, Part
from pipelines.problems import Problem, note
from pipelines.storage import resolve
from pipelines.text.manifest import ArchiveEntry, Layout, ShardEntry
from pipelines.text.parts import list_parts
from pipelines.text.reading import Document, read_documents

_NUM_BATCHES_PER_SHARD = 16  # The layouts yield record batches of up to 256 rows.
_NUM_DOCUMENTS_PER_ENCODE = 64
_NUM_CHARACTERS_PER_ENCODE = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchivePart:
    """A part of one of the archives of a source."""

    archive_number: int
    """Number of the archive within the source."""
    number: int
    """Number of the part within the archive."""
    archive: Archive
    """The archive."""
    part: Part
    """The part of it."""

    @property
    def name(self) -> str:
        """Distinct name of the part, which the names of its files begin with."""
        return part_name(self.archive_number, self.number)


def part_name(archive_number: int, number: int) -> str:
    """Return the name of a part, by the number of its archive and its own number within the archive."""
    return f"part-{archive_number:05d}-{number:05d}"


def list_archive_parts(source: str, archives: Sequence[Archive]) -> list[ArchivePart]:
    """Return the parts of all archives of a source, in stored order (see `pipelines.text.parts.list_parts`)."""
    return [
        ArchivePart(archive_number=archive_number, number=number, archive=archives[archive_number], part=part)
        for archive_number, parts in enumerate(list_parts(source, archives))
        for number, part in enumerate(parts)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartTask:
    """What is needed to prepare any of the parts of a source; it is sent to the tasks."""

    source: str
    """Path or URI that the archives were listed from."""
    text_field: str
    """Name of the JSON field or Parquet column that holds the text."""
    layout: Layout
    """Configuration of how documents become rows."""
    tokenizer: Tokenizer
    """Backend of the tokenizer: a Transformers tokenizer would make every task import torch."""
    tokenizer_digest: str
    """Digest of the tokenizer, for the manifest."""
    directory: str
    """Path or URI of the prepared directory."""
    parts: Sequence[ArchivePart]
    """The parts of the source, in stored order."""

    def run(self, number: int) -> dict[str, Any]:
        """Read, tokenise and write one part; return its summary, an `ArchiveEntry` as a JSON object."""
        # Several tasks share a machine's cores; a single one may use all of them.
        os.environ["TOKENIZERS_PARALLELISM"] = str(len(self.parts) == 1).lower()
        part = self.parts[number]
        archive, prefix = part.archive, f"{self.directory}/{part.name}"
        problems: Counter[str] = Counter()
        examples: list[str] = []
        num_documents = 0

        def documents() -> Iterator[np.ndarray]:
            nonlocal num_documents
            with Losses(losses_name(prefix)) as losses:
                add = partial(losses.add, archive.path)
                readable = readable_documents(
                    self.source, archive, self.text_field, problems, examples, add, part=part.part
                )
                for chunk in _group_texts(readable):
                    num_documents += len(chunk)
                    for encoding in self.tokenizer.encode_batch_fast(chunk, add_special_tokens=False):
                        yield np.asarray(encoding.ids, dtype=np.int64)

        shards: list[ShardEntry] = []
        batches = self.layout.rows(documents())
        while chunk := list(itertools.islice(batches, _NUM_BATCHES_PER_SHARD)):
            shards.append(
                ShardEntry(
                    file=f"{part.name}-{len(shards):05d}.arrow",
                    archive=archive.path,
                    part=part.number,
                    **_write_shard(f"{prefix}-{len(shards):05d}.arrow", chunk, self.layout.schema),
                )
            )
        entry = ArchiveEntry(
            path=archive.path,
            num_bytes=archive.num_bytes,
            num_documents=num_documents,
            problems=dict(problems),
            examples=examples,
            shards=shards,
        )
        return asdict(entry)


def _write_shard(uri: str, batches: list[pa.RecordBatch], schema: pa.Schema) -> dict[str, Any]:
    """Write record batches to a shard, and return the fields of its entry that describe its content."""
    filesystem, path = resolve(uri)
    with filesystem.open_output_stream(path) as sink, pa.ipc.new_file(sink, schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    digest = hashlib.blake2b(digest_size=8)
    for batch in batches:
        digest.update(batch.column("tokens").flatten().to_numpy())
        digest.update(batch.column("num_tokens").to_numpy())
    return {
        "num_rows": sum(batch.num_rows for batch in batches),
        "num_tokens": sum(int(batch.column("num_tokens").to_numpy().sum()) for batch in batches),
        "digest": digest.hexdigest(),
    }


def _group_texts(documents: Iterable[Document]) -> Iterator[list[str]]:
    """Group texts for tokenisation; a group ends when it has a certain number of documents or of characters."""
    chunk: list[str] = []
    num_characters = 0
    for document in documents:
        chunk.append(document.text)
        num_characters += len(document.text)
        if len(chunk) == _NUM_DOCUMENTS_PER_ENCODE or num_characters >= _NUM_CHARACTERS_PER_ENCODE:
            yield chunk
            chunk, num_characters = [], 0
    if chunk:
        yield chunk


def readable_documents(
    source: str,
    archive: Archive,
    text_field: str,
    problems: Counter[str],
    examples: list[str],
    add: Callable[[Problem, Counter[str], list[str]], None] = note,
    *,
    part: Part = WHOLE,
) -> Iterator[Document]:
    """Yield the readable documents of an archive, or of a part of it, and report the problems.

    Args:
        source: the URI that `archive` was listed from.
        archive: the archive to read.
        text_field: name of the JSON field or Parquet column that holds the text.
        problems, examples: counts and examples of problems, which `add` updates in place.
        add: function that records a problem.
        part: the part to read.
    """
    for item in read_documents(source, archive, text_field=text_field, part=part):
        if isinstance(item, Problem):
            add(item, problems, examples)
        else:
            yield item
