"""Parts: groups of documents of one archive, which are predicted, written and resumed as a unit.

A part is an Arrow table with one row per document (`key`, `token_ids`, later `tau` and `entropy`). Through Ray Data it
travels as one row that contains the table as bytes, so that it is neither split nor joined with another part.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from transformers import PreTrainedTokenizerFast

from jobs.scoring.temperatures.texts.settings import PredictionSettings
from pipelines.archives import Archive
from pipelines.storage import read_json, resolve, write_json
from pipelines.text.manifest import ArchiveEntry
from pipelines.text.prepare import readable_documents
from pipelines.text.reading import Document
from pipelines.text.tokenization import load_tokenizer

_READ_SCHEMA = pa.schema({"key": pa.string(), "token_ids": pa.list_(pa.int32())})


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
        filesystem, path = resolve(output)
        filesystem.create_dir(f"{path}/_archives", recursive=True)
        write_json(_record_file(output, number), asdict(self))


def part_file(archive: int, part: int) -> str:
    """Returns the file name of a part's table; sorted by name, the tables follow the order of the documents."""
    return f"part-{archive:05d}-{part:05d}.parquet"


def read_parts(
    settings: PredictionSettings, archive: Archive, number: int, output: str, *, done: frozenset[str]
) -> Iterator[dict[str, Any]]:
    """Yields the tokenised parts of an archive as rows for Ray Data, except those whose file name is in `done`.

    At the end of the archive, its `ReadArchive` is saved.
    """
    tokenizer = load_tokenizer(settings.model)
    problems: Counter[str] = Counter()
    examples: list[str] = []
    num_documents = num_parts = 0
    documents = readable_documents(settings.source, archive, settings.text_field, problems, examples)
    for part in _parts(itertools.islice(documents, settings.max_documents or None), settings.part_characters):
        if part_file(number, num_parts) not in done:
            table = tokenised(part, tokenizer)
            yield {"archive": number, "part": num_parts, "table": to_bytes(table)}
        num_documents += len(part)
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


def tokenised(documents: list[Document], tokenizer: PreTrainedTokenizerFast) -> pa.Table:
    """Returns a table of the keys and token ids of documents, without special tokens."""
    texts = [document.text for document in documents]
    encodings = tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    ids = [np.asarray(encoding.ids, dtype=np.int32) for encoding in encodings]
    return pa.table({"key": [document.key for document in documents], "token_ids": ids}, schema=_READ_SCHEMA)


def token_arrays(column: pa.ChunkedArray) -> list[np.ndarray]:
    """Returns the elements of a list column as arrays."""
    return [value.values.to_numpy() for value in column]


def to_bytes(table: pa.Table) -> bytes:
    """Returns the table as an Arrow IPC stream."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def from_bytes(data: bytes) -> pa.Table:
    """Returns the table in an Arrow IPC stream, the inverse of `to_bytes`."""
    return pa.ipc.open_stream(data).read_all()


def _parts(documents: Iterator[Document], num_characters: int) -> Iterator[list[Document]]:
    """Groups documents; each group ends with the document that reaches the number of characters."""
    part: list[Document] = []
    size = 0
    for document in documents:
        part.append(document)
        size += len(document.text)
        if size >= num_characters:
            yield part
            part, size = [], 0
    if part:
        yield part


def _record_file(output: str, number: int) -> str:
    return f"{output}/_archives/archive-{number:05d}.json"
