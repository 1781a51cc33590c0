"""Prepare text: turn archives into shards of rows and a manifest, with one task per part (`pipelines.prepare`).

A part depends on nothing but its own bytes, so that parts can be prepared in any order, by any number of tasks, and
again after an interruption, with the same result.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from tokenizers import Tokenizer

from pipelines.archives import Archive, describe_not_read, list_source, resolve_source
from pipelines.object_store import unchanged
from pipelines.prepare import directory_name, prepare
from pipelines.problems import (
    NUM_EXAMPLES,
    LostRecords,
    Problem,
    ProblemKind,
    describe_counts,
    estimate_unread,
    lost_name,
)
from pipelines.storage import arrow_file, create_directory, relative, write_bytes
from pipelines.text.manifest import (
    FORMAT_VERSION,
    ArchiveEntry,
    Layout,
    Manifest,
    ShardEntry,
    archive_from_json,
    archive_name,
    part_name,
)
from pipelines.text.reading import PART_BYTES, Part, list_parts, read_documents, report_empty
from pipelines.text.tokenization import load_tokenizer, tokenizer_digest

_NUM_BATCHES_PER_SHARD = 16  # The layouts yield record batches of up to 256 rows.
_NUM_DOCUMENTS_PER_ENCODE = 64
_NUM_CHARACTERS_PER_ENCODE = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareConfig:
    """Which text to prepare, and how."""

    source: str
    """Text archive, directory of text archives, or pattern (`{0..3}`, `*`), as a path or pyarrow URI."""
    tokenizer: str
    """Directory, URI or hub name of a Transformers fast tokenizer, or a tokenizer.json file."""
    text_field: str = "text"
    """Name of the JSON field or Parquet column that holds the text."""
    max_bad_share: float = 0.01
    """Largest share of records that may be unreadable, in [0, 1]; above it, preparation fails."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.max_bad_share <= 1.0:
            raise ValueError(f"max_bad_share = {self.max_bad_share:g} must lie in [0, 1]")


def prepare_text(config: PrepareConfig, layout: Layout, root: str, **options: Any) -> Manifest:
    """Prepare `config.source` in a subdirectory of `root`, or load it if it is already prepared.

    The layout must have been made for the same tokenizer. The options are `max_bad_share_field`, `losses` and
    `resources` of `pipelines.prepare.prepare`.
    """
    task, not_read = locate_text(config, layout, root)
    manifest = prepare(
        lambda: Manifest.load(task.directory),
        task.divide,
        source=config.source,
        directory=task.directory,
        max_bad_share=config.max_bad_share,
        noun="document",
        **options,
    )
    return replace(manifest, not_read=not_read)


def locate_text(config: PrepareConfig, layout: Layout, root: str) -> tuple[PartTask, list[str]]:
    """Return the preparation of a text, which is not divided into parts yet, and the names of files that are not read.

    The name of the prepared directory contains a hash of everything that determines its content.
    """
    tokenizer = load_tokenizer(config.tokenizer, needs_eos=False)
    listing = list_source(config.source)
    digest = tokenizer_digest(tokenizer)
    content = [
        FORMAT_VERSION,
        PART_BYTES,
        [(archive.path, archive.num_bytes, archive.modified_ns) for archive in listing.archives],
        config.text_field,
        layout.kind,
        asdict(layout),
        digest,
    ]
    task = PartTask(
        source=config.source,
        text_field=config.text_field,
        layout=layout,
        tokenizer=tokenizer.backend_tokenizer,
        tokenizer_digest=digest,
        directory=f"{root}/{directory_name(config.source, layout.label, content)}",
        archives=listing.archives,
    )
    return task, listing.not_read


class ArchivePart(NamedTuple):
    """A part of one of the archives of a source."""

    archive_number: int
    number: int
    archive: Archive
    part: Part

    @property
    def name(self) -> str:
        """Distinct name of the part, which the names of its files begin with."""
        return part_name(self.archive_number, self.number)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartTask:
    """Preparation of the parts of a source (see `pipelines.prepare.prepare`)."""

    source: str
    text_field: str
    layout: Layout
    tokenizer: Tokenizer
    """Backend of the tokenizer: a Transformers tokenizer would make every task import torch."""
    tokenizer_digest: str
    directory: str
    archives: Sequence[Archive] = ()
    parts: Sequence[ArchivePart] = ()

    def divide(self) -> PartTask:
        """Divide the archives into parts, and create the directory."""
        create_directory(self.directory)
        parts = [
            ArchivePart(archive_number, number, self.archives[archive_number], part)
            for archive_number, parts in enumerate(list_parts(self.source, self.archives))
            for number, part in enumerate(parts)
        ]
        return replace(self, parts=parts)

    @property
    def unit_names(self) -> list[str]:
        """Names of the parts, in stored order."""
        return [part.name for part in self.parts]

    def run(self, number: int) -> dict[str, Any]:
        """Read, tokenise and write one part; return its summary, an `ArchiveEntry` as a JSON object."""
        # Several tasks share a machine's cores; a single one may use all of them.
        os.environ["TOKENIZERS_PARALLELISM"] = str(len(self.parts) == 1).lower()
        part = self.parts[number]
        archive, prefix = part.archive, f"{self.directory}/{part.name}"
        num_documents = 0
        shards: list[ShardEntry] = []
        filesystem, _ = resolve_source(self.source)
        with LostRecords(lost_name(prefix)) as lost, unchanged(filesystem, archive.path) as version:

            def texts() -> Iterator[str]:
                for item in read_documents(self.source, archive, text_field=self.text_field, part=part.part):
                    if isinstance(item, Problem):
                        lost.add(archive.path, item)
                    else:
                        yield item.text

            def documents() -> Iterator[np.ndarray]:
                nonlocal num_documents
                for chunk in _group_texts(texts()):
                    num_documents += len(chunk)
                    for encoding in self.tokenizer.encode_batch_fast(chunk, add_special_tokens=False):
                        yield np.asarray(encoding.ids, dtype=np.int64)

            batches = self.layout.rows(documents())
            while chunk := list(itertools.islice(batches, _NUM_BATCHES_PER_SHARD)):
                name = f"{part.name}-{len(shards):05d}.arrow"
                content = _write_shard(f"{self.directory}/{name}", chunk, self.layout.schema)
                shards.append(ShardEntry(file=name, archive=archive.path, part=part.number, **content))
        entry = ArchiveEntry(
            path=archive.path,
            num_bytes=archive.num_bytes,
            num_documents=num_documents,
            problems=dict(lost.problems),
            examples=lost.examples,
            shards=shards,
            num_bytes_unread=lost.num_bytes_unread,
            version=version,
        )
        return asdict(entry)

    def finish(self, records: Sequence[dict[str, Any]]) -> Manifest:
        """Combine the summaries of all parts to one of each archive, and report what only all of them show.

        That is an archive without any record, and an estimate of what lies behind the place where one cannot be read further.
        An archive that was written again between its parts raises OSError.
        """
        archives: list[ArchiveEntry] = []
        pairs = zip(self.parts, map(archive_from_json, records), strict=True)
        for _, group in itertools.groupby(pairs, key=lambda pair: pair[0].archive_number):
            parts = [entry for _, entry in group]
            if len({part.version for part in parts}) > 1:
                raise OSError(
                    f"{parts[0].path} was written again between its parts: delete {self.directory}, which holds records of "
                    "both versions, and prepare it again"
                )
            unread = [part.num_bytes_unread for part in parts if part.num_bytes_unread is not None]
            archives.append(
                replace(
                    parts[0],
                    num_documents=sum(part.num_documents for part in parts),
                    problems=dict(sum((Counter(part.problems) for part in parts), Counter[str]())),
                    examples=[example for part in parts for example in part.examples][:NUM_EXAMPLES],
                    shards=[shard for part in parts for shard in part.shards],
                    num_parts=len(parts),
                    num_bytes_unread=sum(unread) if unread else None,
                )
            )
        estimates = list(estimate_unread(archives, ProblemKind.UNREAD_DOCUMENT, "document"))
        for number, (archive, problem) in enumerate(zip(archives, estimates, strict=True)):
            if not archive.num_documents and not archive.problems:
                problem = report_empty(relative(archive.path, resolve_source(self.source)[1]))
            if problem is not None:
                with LostRecords(lost_name(f"{self.directory}/{archive_name(number)}")) as lost:
                    archives[number] = lost.add_to(archive, [problem])
        return Manifest(
            directory=self.directory,
            tokenizer_digest=self.tokenizer_digest,
            layout=self.layout,
            archives=archives,
        )


def _write_shard(uri: str, batches: list[pa.RecordBatch], schema: pa.Schema) -> dict[str, Any]:
    """Write record batches to a shard, and return the fields of its entry that describe its content."""
    write_bytes(uri, arrow_file(batches, schema))
    digest = hashlib.blake2b(digest_size=8)
    for batch in batches:
        digest.update(batch.column("tokens").flatten().to_numpy())
        digest.update(batch.column("num_tokens").to_numpy())
    return {
        "num_rows": sum(batch.num_rows for batch in batches),
        "num_tokens": sum(int(batch.column("num_tokens").to_numpy().sum()) for batch in batches),
        "digest": digest.hexdigest(),
    }


def _group_texts(texts: Iterable[str]) -> Iterator[list[str]]:
    """Group texts for tokenisation; a group ends when it has a certain number of documents or of characters."""
    chunk: list[str] = []
    num_characters = 0
    for text in texts:
        chunk.append(text)
        num_characters += len(text)
        if len(chunk) == _NUM_DOCUMENTS_PER_ENCODE or num_characters >= _NUM_CHARACTERS_PER_ENCODE:
            yield chunk
            chunk, num_characters = [], 0
    if chunk:
        yield chunk


def describe(manifest: Manifest, seconds: float | None = None) -> str:
    """Summarise the counts of a prepared data set in one line, for a human reader."""
    duration = "" if seconds is None else f" in {seconds:.0f} s"
    return (
        f"{manifest.num_documents} documents, {manifest.layout.describe(manifest.num_rows, manifest.num_documents)}, "
        f"{manifest.num_tokens} tokens ({len(manifest.shards)} shards, digest {manifest.digest}){duration}; "
        f"unreadable: {describe_counts(manifest.problems)}{describe_not_read(manifest.not_read)}"
    )
