"""Prepare text: turn archives into shards of rows and a manifest, with one task per part (`pipelines.prepare`).

A part depends on nothing but its own bytes, so that parts can be prepared in any order, by any number of tasks, and
again after an interruption, with the same result.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from pipelines.archives import Archive, describe_not_read, list_source, resolve_source
from pipelines.object_store import unchanged
from pipelines.prepare import directory_name, prepare
from pipelines.problems import NUM_EXAMPLES, LostRecords, describe_counts, lost_name
from pipelines.storage import create_directory, relative, resolve
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
from pipelines.text.reading import PART_BYTES, Document, Part, list_parts, readable_documents, report_empty
from pipelines.text.tokenization import load_tokenizer, tokenizer_digest

_NUM_BATCHES_PER_SHARD = 16  # The layouts yield record batches of up to 256 rows.
_NUM_DOCUMENTS_PER_ENCODE = 64
_NUM_CHARACTERS_PER_ENCODE = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareConfig:
    """Which text to prepare, and how.

    Raises:
        ValueError: if `max_bad_share` is outside [0, 1].
    """

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


def prepare_text(
    config: PrepareConfig,
    layout: Layout,
    root: str,
    *,
    max_bad_share_field: str = "max_bad_share",
    losses: str = "",
    resources: Mapping[str, float] | None = None,
) -> Manifest:
    """Prepare `config.source` in a subdirectory of `root`, or load it if it is already prepared.

    Args:
        config: which text to read, and the tokenizer.
        layout: how the tokens of documents become rows; it must have been made for the same tokenizer.
        root: path or URI of the directory of all prepared data.
        max_bad_share_field, losses, resources: see `pipelines.prepare.prepare`.

    Raises:
        FileNotFoundError: if the source does not exist or holds no archive.
        ValueError: if the source is a file of an unknown format, or the tokenizer cannot be loaded.
        TooManyProblemsError: if too many records are unreadable; the message names the share, the kinds of problems
            and the archives.
    """
    target = PreparedTarget.locate(config, layout, root)
    manifest = prepare(
        lambda: Manifest.load(target.directory),
        target.make_task,
        source=config.source,
        directory=target.directory,
        max_bad_share=config.max_bad_share,
        field=max_bad_share_field,
        noun="document",
        losses=losses,
        resources=resources,
    )
    return dataclasses.replace(manifest, not_read=target.not_read)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedTarget:
    """Where a text is prepared, and what is needed to do so."""

    config: PrepareConfig
    """Which text to read, and how."""
    layout: Layout
    """How the tokens of documents become rows."""
    tokenizer: PreTrainedTokenizerFast
    """The tokenizer that `config` names."""
    archives: list[Archive]
    """The archives of the source."""
    directory: str
    """Path or URI of the prepared directory; its name contains a hash of everything that determines its content."""
    not_read: list[str] = field(default_factory=list)
    """Names of the files of the source that are not read."""

    @classmethod
    def locate(cls, config: PrepareConfig, layout: Layout, root: str) -> PreparedTarget:
        """Load the tokenizer, list the archives, and determine the directory below `root`; see `prepare_text`."""
        tokenizer = load_tokenizer(config.tokenizer, needs_eos=False)
        listing = list_source(config.source)
        files = [(archive.path, archive.num_bytes) for archive in listing.archives]
        content = json.dumps(
            [
                FORMAT_VERSION,
                PART_BYTES,
                files,
                config.text_field,
                layout.kind,
                # Without a default that earlier versions did not have, so that what they prepared is found.
                {name: value for name, value in asdict(layout).items() if (name, value) != ("documents", "all")},
                tokenizer_digest(tokenizer),
            ]
        )
        digest = hashlib.blake2b(content.encode(), digest_size=6).hexdigest()
        return cls(
            config=config,
            layout=layout,
            tokenizer=tokenizer,
            archives=listing.archives,
            directory=f"{root}/{directory_name(config.source, layout.label, digest)}",
            not_read=listing.not_read,
        )

    def make_task(self) -> PartTask:
        """Divide the archives into parts, create the directory, and return the preparation of the parts."""
        parts = list_archive_parts(self.config.source, self.archives)
        create_directory(self.directory)
        return PartTask(
            source=self.config.source,
            text_field=self.config.text_field,
            layout=self.layout,
            tokenizer=self.tokenizer.backend_tokenizer,
            tokenizer_digest=tokenizer_digest(self.tokenizer),
            directory=self.directory,
            parts=parts,
        )


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


def list_archive_parts(source: str, archives: Sequence[Archive]) -> list[ArchivePart]:
    """Return the parts of all archives of a source, in stored order (see `pipelines.text.reading.list_parts`)."""
    return [
        ArchivePart(archive_number=archive_number, number=number, archive=archives[archive_number], part=part)
        for archive_number, parts in enumerate(list_parts(source, archives))
        for number, part in enumerate(parts)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartTask:
    """Preparation of the parts of a source (see `pipelines.prepare.Task`)."""

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

    @property
    def unit_names(self) -> list[str]:
        """Names of the parts, in stored order."""
        return [part.name for part in self.parts]

    def run(self, number: int) -> dict[str, Any]:
        """Read, tokenise and write one part; return its summary, an `ArchiveEntry` as a JSON object.

        Raises:
            OSError: if the archive cannot be read, or is written again meanwhile.
        """
        # Several tasks share a machine's cores; a single one may use all of them.
        os.environ["TOKENIZERS_PARALLELISM"] = str(len(self.parts) == 1).lower()
        part = self.parts[number]
        archive, prefix = part.archive, f"{self.directory}/{part.name}"
        problems: Counter[str] = Counter()
        examples: list[str] = []
        num_documents = 0

        def documents() -> Iterator[np.ndarray]:
            nonlocal num_documents
            with LostRecords(lost_name(prefix)) as lost:
                add = partial(lost.add, archive.path)
                readable = readable_documents(
                    self.source, archive, self.text_field, problems, examples, add, part=part.part
                )
                for chunk in _group_texts(readable):
                    num_documents += len(chunk)
                    for encoding in self.tokenizer.encode_batch_fast(chunk, add_special_tokens=False):
                        yield np.asarray(encoding.ids, dtype=np.int64)

        shards: list[ShardEntry] = []
        batches = self.layout.rows(documents())
        with unchanged(resolve_source(self.source)[0], archive.path) as version:
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
            version=version,
        )
        return asdict(entry)

    def finish(self, records: Sequence[dict[str, Any]]) -> Manifest:
        """Combine the summaries of all parts to one of each archive, and report archives that turn out to be empty.

        Raises:
            OSError: if an archive was written again between its parts.
        """
        archives: list[ArchiveEntry] = []
        pairs = zip(self.parts, map(archive_from_json, records), strict=True)
        for number, group in itertools.groupby(pairs, key=lambda pair: pair[0].archive_number):
            parts = [entry for _, entry in group]
            if len({part.version for part in parts}) > 1:
                raise OSError(
                    f"{parts[0].path} was written again between its parts: delete {self.directory}, which holds records of "
                    "both versions, and prepare it again"
                )
            problems = sum((Counter(part.problems) for part in parts), Counter[str]())
            examples = [example for part in parts for example in part.examples][:NUM_EXAMPLES]
            num_documents = sum(part.num_documents for part in parts)
            if not num_documents and not problems:  # A part alone cannot tell that its archive holds no record.
                empty = report_empty(relative(parts[0].path, resolve_source(self.source)[1]))
                with LostRecords(lost_name(f"{self.directory}/{archive_name(number)}")) as lost:
                    lost.add(parts[0].path, empty, problems, examples)
            archives.append(
                dataclasses.replace(
                    parts[0],
                    num_documents=num_documents,
                    problems=dict(problems),
                    examples=examples,
                    shards=[shard for part in parts for shard in part.shards],
                    num_parts=len(parts),
                )
            )
        return Manifest(
            directory=self.directory,
            tokenizer_digest=self.tokenizer_digest,
            layout=self.layout,
            archives=archives,
        )


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


def describe(manifest: Manifest, seconds: float | None = None) -> str:
    """Summarise the counts of a prepared data set in one line, for a human reader."""
    duration = "" if seconds is None else f" in {seconds:.0f} s"
    return (
        f"{manifest.num_documents} documents, {manifest.layout.describe(manifest.num_rows, manifest.num_documents)}, "
        f"{manifest.num_tokens} tokens ({len(manifest.shards)} shards, digest {manifest.digest}){duration}; "
        f"unreadable: {describe_counts(manifest.problems)}{describe_not_read(manifest.not_read)}"
    )
