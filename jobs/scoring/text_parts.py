"""Parts of texts: archives → parts of their documents → a pool of models.

A part is a group of documents of one archive, which is scored, written and resumed as a unit. It holds an Arrow table with
one row per document (`key`, `token_ids`). Archives are read in Ray Data's tasks, beside the pool.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import pyarrow as pa
from transformers import PreTrainedTokenizerFast

from jobs.scoring.config import PoolSection
from jobs.scoring.text_sources import TextSettings
from jobs.scoring.units import Finished, Outcome, UnitStore, Work, map_units, part_file
from pipelines.archives import Archive, resolve_source
from pipelines.problems import check_problems
from pipelines.storage import create_directory, read_json, relative, write_json
from pipelines.text.manifest import ArchiveEntry
from pipelines.text.reading import Document, readable_documents
from pipelines.text.tokenization import load_tokenizer

_READ_SCHEMA = pa.schema({"key": pa.string(), "token_ids": pa.list_(pa.int32())})


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive documents of one archive."""

    archive: int
    """Position of the archive among all archives."""
    number: int
    """Position of the part in its archive."""
    source: str
    """Path of the archive, relative to what was read."""
    table: pa.Table

    @property
    def file(self) -> str:
        """File name of the part's table."""
        return part_file(self.archive, self.number)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadArchive:
    """A record of what one archive contained; it is written once the archive has been read to its end."""

    entry: ArchiveEntry
    num_parts: int

    @classmethod
    def load(cls, output: str, number: int) -> ReadArchive | None:
        """Returns the record of an archive, or None if the archive was never read to its end."""
        values = read_json(_record_file(output, number))
        return None if values is None else cls(entry=ArchiveEntry(**values["entry"]), num_parts=values["num_parts"])

    def save(self, output: str, number: int) -> None:
        """Write the record."""
        create_directory(f"{output}/_archives")
        write_json(_record_file(output, number), asdict(self))


def map_archives(
    settings: TextSettings,
    archives: Sequence[Archive],
    output: str,
    workers: PoolSection,
    model: Callable[[], Callable[[Part], Finished]],
    *,
    max_bad_share: float,
    say: Callable[[str], None] = print,
) -> tuple[list[ReadArchive], Outcome]:
    """Score the parts that the output lacks, and return the records of all archives.

    The tables of parts depend neither on the number of workers nor on the order in which they are finished.

    Args:
        settings: what decides the parts.
        archives: the archives to read.
        output: directory or URI of the tables.
        workers: number and resources of the worker processes.
        model: builds what makes the table of a part.
        max_bad_share: largest share of records that may be unreadable.
        say: called with one line of text for every finished part.

    Raises:
        ValueError: if the cluster can never provide the workers.
        ScoringFailedError: naming every archive that failed; the parts that were finished are kept.
        TooManyProblemsError: if too many records were unreadable; the tables of the readable ones are kept.
    """
    store = UnitStore(output)
    done = store.parts()
    missing = [number for number in range(len(archives)) if not _is_complete(output, number, done)]
    if len(missing) < len(archives) or done:
        say(
            f"{output} holds {len(done)} parts; {len(archives) - len(missing)} of {len(archives)} archives are complete"
        )
    root = resolve_source(settings.source)[1]
    names = [relative(archive.path, root) for archive in archives]

    def read(number: int) -> Iterator[Part]:
        return read_parts(settings, archives[number], number, output, done=done)

    work: Work[int] = Work(read=read, model=model, title=names.__getitem__, noun="tokens")
    outcome = map_units(missing, work, workers, store, say=say)
    outcome.check()
    records = [record for number in range(len(archives)) if (record := ReadArchive.load(output, number)) is not None]
    check_problems(settings.source, [record.entry for record in records], max_bad_share, field="max_bad_share")
    return records, outcome


def part_files(records: Sequence[ReadArchive]) -> list[str]:
    """Returns the names of the tables of all parts of archives, in order."""
    return [part_file(number, part) for number, record in enumerate(records) for part in range(record.num_parts)]


def _is_complete(output: str, number: int, done: frozenset[str]) -> bool:
    record = ReadArchive.load(output, number)
    return record is not None and all(part_file(number, part) in done for part in range(record.num_parts))


def read_parts(
    settings: TextSettings, archive: Archive, number: int, output: str, *, done: frozenset[str]
) -> Iterator[Part]:
    """Yields the tokenised parts of an archive, except those whose file name is in `done`.

    At the end of the archive, its `ReadArchive` is saved.
    """
    tokenizer = load_tokenizer(settings.model)
    problems: Counter[str] = Counter()
    examples: list[str] = []
    num_documents = num_parts = 0
    source = relative(archive.path, resolve_source(settings.source)[1])
    documents = readable_documents(settings.source, archive, settings.text_field, problems, examples)
    for group in _groups(itertools.islice(documents, settings.max_documents or None), settings.part_characters):
        if part_file(number, num_parts) not in done:
            yield Part(number, num_parts, source, tokenise(group, tokenizer))
        num_documents += len(group)
        num_parts += 1
    entry = ArchiveEntry(
        path=archive.path,
        num_bytes=archive.num_bytes,
        num_documents=num_documents,
        problems=dict(problems),
        examples=examples,
        shards=[],
    )
    ReadArchive(entry=entry, num_parts=num_parts).save(output, number)


def tokenise(documents: list[Document], tokenizer: PreTrainedTokenizerFast) -> pa.Table:
    """Returns a table of the keys and token ids of documents, without special tokens."""
    texts = [document.text for document in documents]
    encodings = tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    ids = [np.asarray(encoding.ids, dtype=np.int32) for encoding in encodings]
    return pa.table({"key": [document.key for document in documents], "token_ids": ids}, schema=_READ_SCHEMA)


def token_arrays(column: pa.ChunkedArray) -> list[np.ndarray]:
    """Returns the elements of a list column as arrays."""
    return [value.values.to_numpy() for value in column]


def _groups(documents: Iterator[Document], num_characters: int) -> Iterator[list[Document]]:
    """Groups documents; each group ends with the document that reaches the number of characters."""
    group: list[Document] = []
    size = 0
    for document in documents:
        group.append(document)
        size += len(document.text)
        if size >= num_characters:
            yield group
            group, size = [], 0
    if group:
        yield group


def _record_file(output: str, number: int) -> str:
    return f"{output}/_archives/archive-{number:05d}.json"
