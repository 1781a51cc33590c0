"""Prepare text: a Ray Data job that turns archives into shards of rows and a manifest, with one task per archive.

The name of the prepared directory contains a hash of everything that determines its content, so that preparing the
same data again costs nothing, and an interrupted preparation continues with the remaining archives.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
from tokenizers import Tokenizer

from pipelines.archive_tasks import run_archive_tasks
from pipelines.archives import Archive, list_archives
from pipelines.losses import Losses, list_losses, losses_name
from pipelines.problems import Problem, check_problems, note
from pipelines.storage import resolve
from pipelines.text.manifest import FORMAT_VERSION, ArchiveEntry, Layout, Manifest, ShardEntry, archive_from_json
from pipelines.text.reading import Document, read_documents
from pipelines.text.tokenization import load_tokenizer, tokenizer_digest

NUM_BATCHES_PER_SHARD = 16  # The layouts yield record batches of up to 256 rows.
_NUM_DOCUMENTS_PER_ENCODE = 64
_NUM_CHARACTERS_PER_ENCODE = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareConfig:
    """Which text to prepare, and how.

    Raises:
        ValueError: if `max_bad_share` is outside [0, 1].
    """

    source: str
    """Text archive or directory of text archives, as a path or pyarrow URI."""
    tokenizer: str
    """Transformers fast tokenizer, as a directory, a tokenizer.json file or a hub name."""
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
) -> Manifest:
    """Prepare `config.source` in a subdirectory of `root`, or load it if it is already prepared.

    Ray must be running.

    Args:
        config: which text to read, and the tokenizer.
        layout: how the tokens of documents become rows; it must have been made for the same tokenizer.
        root: path or URI of the directory of all prepared data.
        max_bad_share_field: name of the setting that `max_bad_share` comes from, for the error message.
        losses: path or URI of a file to list every lost record in (`pipelines.losses`); it is also written if there
            are too many. If empty, no list is written.

    Raises:
        FileNotFoundError: if the source does not exist or holds no archive.
        ValueError: if the source is a file of an unknown format, or the tokenizer cannot be loaded.
        TooManyProblemsError: if too many records are unreadable; the message names the share, the kinds of problems
            and the archives.
    """
    tokenizer = load_tokenizer(config.tokenizer, needs_eos=False)
    # Only the backend is sent to the tasks, because a Transformers tokenizer would make each of them import torch.
    backend = tokenizer.backend_tokenizer
    archives = list_archives(config.source)
    directory = f"{root}/{_name_content(config, layout, tokenizer_digest(tokenizer), archives)}"
    try:
        manifest = Manifest.load(directory)
    except FileNotFoundError:
        filesystem, path = resolve(directory)
        filesystem.create_dir(path, recursive=True)

        def prepare(number: int) -> dict[str, Any]:
            return asdict(_prepare_archive(config, layout, backend, archives[number], number, directory))

        entries = [archive_from_json(entry) for entry in run_archive_tasks(prepare, len(archives), directory)]
        manifest = Manifest(
            directory=directory, tokenizer_digest=tokenizer_digest(tokenizer), layout=layout, archives=entries
        )
        manifest.save()
    if losses:
        list_losses(directory, [losses_name(_shard_prefix(number)) for number in range(len(archives))], losses)
    check_problems(config.source, manifest.archives, config.max_bad_share, field=max_bad_share_field)
    return manifest


def _name_content(config: PrepareConfig, layout: Layout, tokenizer: str, archives: list[Archive]) -> str:
    """Return a directory name that contains a hash of everything that determines the prepared content."""
    files = [(archive.path, archive.num_bytes) for archive in archives]
    content = json.dumps([FORMAT_VERSION, files, config.text_field, layout.kind, asdict(layout), tokenizer])
    digest = hashlib.blake2b(content.encode(), digest_size=6).hexdigest()
    name = config.source.rstrip("/").rsplit("/", 1)[-1].split(".")[0]
    return f"{name}-{layout.label}-{digest}"


def _prepare_archive(
    config: PrepareConfig, layout: Layout, tokenizer: Tokenizer, archive: Archive, number: int, directory: str
) -> ArchiveEntry:
    """Read and tokenise one archive, convert its documents to rows, and write them as shards."""
    problems: Counter[str] = Counter()
    examples: list[str] = []
    num_documents = 0

    def documents() -> Iterator[np.ndarray]:
        nonlocal num_documents
        with Losses(losses_name(f"{directory}/{_shard_prefix(number)}")) as losses:
            add = partial(losses.add, archive.path)
            readable = readable_documents(config.source, archive, config.text_field, problems, examples, add)
            for chunk in _group_texts(readable):
                num_documents += len(chunk)
                for encoding in tokenizer.encode_batch_fast(chunk, add_special_tokens=False):
                    yield np.asarray(encoding.ids, dtype=np.int64)

    shards: list[ShardEntry] = []
    batches = layout.rows(documents())
    while chunk := list(itertools.islice(batches, NUM_BATCHES_PER_SHARD)):
        file = f"{_shard_prefix(number)}-{len(shards):05d}.arrow"
        filesystem, path = resolve(f"{directory}/{file}")
        with filesystem.open_output_stream(path) as sink, pa.ipc.new_file(sink, layout.schema) as writer:
            for batch in chunk:
                writer.write_batch(batch)
        digest = hashlib.blake2b(digest_size=8)
        for batch in chunk:
            digest.update(batch.column("tokens").flatten().to_numpy())
            digest.update(batch.column("num_tokens").to_numpy())
        shards.append(
            ShardEntry(
                file=file,
                archive=archive.path,
                num_rows=sum(batch.num_rows for batch in chunk),
                num_tokens=sum(int(batch.column("num_tokens").to_numpy().sum()) for batch in chunk),
                digest=digest.hexdigest(),
            )
        )
    return ArchiveEntry(
        path=archive.path,
        num_bytes=archive.num_bytes,
        num_documents=num_documents,
        problems=dict(problems),
        examples=examples,
        shards=shards,
    )


def _shard_prefix(number: int) -> str:
    """Return the common prefix of the names of an archive's files."""
    return f"shard-{number:05d}"


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
) -> Iterator[Document]:
    """Yield the readable documents of an archive, and report its problems.

    Args:
        source: the URI that `archive` was listed from.
        archive: the archive to read.
        text_field: name of the JSON field or Parquet column that holds the text.
        problems, examples: counts and examples of problems, which `add` updates in place.
        add: function that records a problem.
    """
    for item in read_documents(source, archive, text_field=text_field):
        if isinstance(item, Problem):
            add(item, problems, examples)
        else:
            yield item


def describe(manifest: Manifest, seconds: float | None = None) -> str:
    """Summarise the counts of a prepared data set in one line, for a human reader."""
    lost = ", ".join(f"{number} {kind}" for kind, number in sorted(manifest.problems.items())) or "none"
    duration = "" if seconds is None else f" in {seconds:.0f} s"
    return (
        f"{manifest.num_documents} documents, {manifest.layout.describe(manifest.num_rows, manifest.num_documents)}, "
        f"{manifest.num_tokens} tokens ({len(manifest.shards)} shards, digest {manifest.digest}){duration}; "
        f"unreadable: {lost}"
    )
