"""Preparing text: a Ray Data job that turns archives into shards of rows and a manifest, one task an archive.

The directory is named after everything that decides its content, so preparing again is free, and an interrupted
preparation goes on with the archives that are left.
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

NUM_BATCHES_PER_SHARD = 16  # of 256 rows, as the layouts make them
_NUM_DOCUMENTS_PER_ENCODE = 64
_NUM_CHARACTERS_PER_ENCODE = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareConfig:
    """What to prepare and how."""

    source: str
    """A text archive, or a directory of them, as a path or pyarrow URI."""
    tokenizer: str
    """A Transformers fast tokenizer: directory, tokenizer.json or hub name."""
    text_field: str = "text"
    """The field (column) that holds the text."""
    max_bad_share: float = 0.01
    """Share of records that may be unreadable before preparing fails."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.max_bad_share <= 1.0:
            raise ValueError(f"data.max_bad_share = {self.max_bad_share:g} must lie in [0, 1]")


def prepare_text(config: PrepareConfig, layout: Layout, root: str, *, losses: str = "") -> Manifest:
    """Prepare `config.source` under the directory `root` (path or URI), or return what is already there.

    Needs a running Ray.

    Args:
        config: what to read, and the tokenizer.
        layout: what the tokens of the documents become, made for the same tokenizer.
        root: of all prepared data.
        losses: path or URI of a file to write every lost record to (`pipelines.losses`), also if there are too many.

    Raises:
        FileNotFoundError, ValueError: the source does not exist or holds no archive; the tokenizer does not fit.
        TooManyProblemsError: naming the share, the kinds and the archives.
    """
    tokenizer = load_tokenizer(config.tokenizer, needs_eos=False)
    # What the tasks receive: a tokenizer of Transformers would have each of them load torch.
    backend = tokenizer.backend_tokenizer
    archives = list_archives(config.source)
    directory = f"{root}/{_content_name(config, layout, tokenizer_digest(tokenizer), archives)}"
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
        list_losses(directory, [losses_name(_shards(number)) for number in range(len(archives))], losses)
    check_problems(config.source, manifest.archives, config.max_bad_share)
    return manifest


def _content_name(config: PrepareConfig, layout: Layout, tokenizer: str, archives: list[Archive]) -> str:
    """A directory name that is a function of everything that decides the prepared content."""
    files = [(archive.path, archive.num_bytes) for archive in archives]
    content = json.dumps([FORMAT_VERSION, files, config.text_field, layout.kind, asdict(layout), tokenizer])
    digest = hashlib.blake2b(content.encode(), digest_size=6).hexdigest()
    name = config.source.rstrip("/").rsplit("/", 1)[-1].split(".")[0]
    return f"{name}-{layout.label}-{digest}"


def _prepare_archive(
    config: PrepareConfig, layout: Layout, tokenizer: Tokenizer, archive: Archive, number: int, directory: str
) -> ArchiveEntry:
    """Read, tokenise, lay out and write one archive."""
    problems: Counter[str] = Counter()
    examples: list[str] = []
    num_documents = 0

    def documents() -> Iterator[np.ndarray]:
        nonlocal num_documents
        with Losses(losses_name(f"{directory}/{_shards(number)}")) as losses:
            add = partial(losses.add, archive.path)
            readable = readable_documents(config.source, archive, config.text_field, problems, examples, add)
            for chunk in _chunks(readable):
                num_documents += len(chunk)
                for encoding in tokenizer.encode_batch_fast(chunk, add_special_tokens=False):
                    yield np.asarray(encoding.ids, dtype=np.int64)

    shards: list[ShardEntry] = []
    batches = layout.rows(documents())
    while chunk := list(itertools.islice(batches, NUM_BATCHES_PER_SHARD)):
        file = f"{_shards(number)}-{len(shards):05d}.arrow"
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


def _shards(number: int) -> str:
    """What the names of an archive's files begin with."""
    return f"shard-{number:05d}"


def _chunks(documents: Iterable[Document]) -> Iterator[list[str]]:
    """The texts in groups that are tokenised at once: of so many documents, or as soon as they have so many characters."""
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
    """The documents of an archive; what cannot be read is given to `add`, which counts it and remembers the first few."""
    for item in read_documents(source, archive, text_field=text_field):
        if isinstance(item, Problem):
            add(item, problems, examples)
        else:
            yield item


def describe(manifest: Manifest, seconds: float | None = None) -> str:
    """Counts of a prepared data set, for a person."""
    lost = ", ".join(f"{number} {kind}" for kind, number in sorted(manifest.problems.items())) or "none"
    took = "" if seconds is None else f" in {seconds:.0f} s"
    return (
        f"{manifest.num_documents} documents, {manifest.layout.describe(manifest.num_rows, manifest.num_documents)}, "
        f"{manifest.num_tokens} tokens ({len(manifest.shards)} shards, digest {manifest.digest}){took}; "
        f"unreadable: {lost}"
    )
