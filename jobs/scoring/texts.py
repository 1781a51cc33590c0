"""Texts for a language model: archives → parts of their documents → a pool of models; and how long documents are read.

A part is a group of documents of one archive, which is scored, written and resumed as a unit. It holds an Arrow table with
one row per document (`key`, `token_ids`). Archives are read in Ray Data's tasks, beside the pool.

A document of n tokens t1 … tn is the stream [bos] t1 … tn. Reading stream positions 0 … n−1 gives the predictions of t1
… tn; position i predicts t(i+1). With a context of C positions and a stride of S, window k reads positions k·S … k·S +
C − 1, and contributes the predictions that no earlier window has made: all C of the first window, the last S of every
other. So every token but the first C is predicted from at least C − S + 1 preceding tokens. The positions of the
windows do not depend on n: a truncated document gets the same predictions up to its end. Windows are read without adding
a bos: only the first one starts with it.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

import numpy as np
import pyarrow as pa
from pyarrow.fs import FileType
from transformers import PretrainedConfig, PreTrainedTokenizerFast

from jobs.scoring.config import PoolSection
from jobs.scoring.units import Finished, Outcome, UnitStore, Work, map_units, part_file
from pipelines.archives import PLAIN_SUFFIXES, SUFFIXES, Archive, list_archives, resolve_source
from pipelines.problems import check_problems
from pipelines.storage import create_directory, read_json, relative, resolve, write_json
from pipelines.text.manifest import ArchiveEntry
from pipelines.text.reading import Document, readable_documents
from pipelines.text.tokenization import load_tokenizer

_READ_SCHEMA = pa.schema({"key": pa.string(), "token_ids": pa.list_(pa.int32())})


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


class ReadSettings(Protocol):
    """The settings that decide which parts an archive has."""

    @property
    def source(self) -> str:
        """Path or URI that the archives were listed from."""

    @property
    def model(self) -> str:
        """Directory, URI or hub name of the model, whose tokenizer is used."""

    @property
    def text_field(self) -> str:
        """Name of the field or column that contains the text."""

    @property
    def max_documents(self) -> int:
        """Maximum number of documents of each archive; 0 for all."""

    @property
    def part_characters(self) -> int:
        """Number of characters with which a part ends."""


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
    settings: ReadSettings,
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
    settings: ReadSettings, archive: Archive, number: int, output: str, *, done: frozenset[str]
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
