"""Prepare text: a Ray Data job that turns archives into shards of rows and a manifest, with one task per part.

The name of the prepared directory contains a hash of everything that determines its content, so that preparing the
same data again costs nothing, and an interrupted preparation continues with the remaining parts of archives.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from transformers import PreTrainedTokenizerFast

from pipelines.archives import Archive, list_archives
from pipelines.losses import Losses, list_losses, losses_name
from pipelines.problems import NUM_EXAMPLES, check_problems
from pipelines.recorded_tasks import run_recorded_tasks
from pipelines.storage import relative, resolve
from pipelines.text.manifest import FORMAT_VERSION, ArchiveEntry, Layout, Manifest, archive_from_json
from pipelines.text.part_preparation import PartTask, list_archive_parts, part_name
from pipelines.text.parts import PART_BYTES
from pipelines.text.reading import ProblemKind, report_empty
from pipelines.text.tokenization import load_tokenizer, tokenizer_digest


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareConfig:
    """Which text to prepare, and how.

    Raises:
        ValueError: if `max_bad_share` is outside [0, 1].
    """

    source: str
    """Text archive or directory of text archives, as a path or pyarrow URI."""
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
        max_bad_share_field: name of the setting that `max_bad_share` comes from, for the error message.
        losses: path or URI of a file to list every lost record in (`pipelines.losses`); it is also written if there
            are too many. If empty, no list is written.
        resources: custom Ray resources that every task takes, by which the tasks are kept to certain nodes.

    Raises:
        FileNotFoundError: if the source does not exist or holds no archive.
        ValueError: if the source is a file of an unknown format, or the tokenizer cannot be loaded.
        TooManyProblemsError: if too many records are unreadable; the message names the share, the kinds of problems
            and the archives.
    """
    target = PreparedTarget.locate(config, layout, root)
    try:
        manifest = Manifest.load(target.directory)
    except FileNotFoundError:
        task = target.make_task()
        names = [part.name for part in task.parts]
        records = run_recorded_tasks(task.run, names, target.directory, resources=resources)
        manifest = finish_manifest(task, [archive_from_json(record) for record in records])
    if losses:
        list_losses(target.directory, _list_losses_files(manifest), losses)
    check_problems(config.source, manifest.archives, config.max_bad_share, field=max_bad_share_field)
    return manifest


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

    @classmethod
    def locate(cls, config: PrepareConfig, layout: Layout, root: str) -> PreparedTarget:
        """Load the tokenizer, list the archives, and determine the directory below `root`; see `prepare_text`."""
        tokenizer = load_tokenizer(config.tokenizer, needs_eos=False)
        archives = list_archives(config.source)
        files = [(archive.path, archive.num_bytes) for archive in archives]
        content = json.dumps(
            [
                FORMAT_VERSION,
                PART_BYTES,
                files,
                config.text_field,
                layout.kind,
                asdict(layout),
                tokenizer_digest(tokenizer),
            ]
        )
        digest = hashlib.blake2b(content.encode(), digest_size=6).hexdigest()
        name = config.source.rstrip("/").rsplit("/", 1)[-1].split(".")[0]
        return cls(
            config=config,
            layout=layout,
            tokenizer=tokenizer,
            archives=archives,
            directory=f"{root}/{name}-{layout.label}-{digest}",
        )

    def make_task(self) -> PartTask:
        """Divide the archives into parts, create the directory, and return the preparation of the parts."""
        parts = list_archive_parts(self.config.source, self.archives)
        filesystem, path = resolve(self.directory)
        filesystem.create_dir(path, recursive=True)
        return PartTask(
            source=self.config.source,
            text_field=self.config.text_field,
            layout=self.layout,
            tokenizer=self.tokenizer.backend_tokenizer,
            tokenizer_digest=tokenizer_digest(self.tokenizer),
            directory=self.directory,
            parts=parts,
        )


def finish_manifest(task: PartTask, entries: Sequence[ArchiveEntry]) -> Manifest:
    """Write and return the manifest of a data set, all parts of which are prepared.

    Args:
        task: the preparation of the parts.
        entries: the summary of every part, in stored order.
    """
    manifest = Manifest(
        directory=task.directory,
        tokenizer_digest=task.tokenizer_digest,
        layout=task.layout,
        archives=merge_parts(task, entries),
    )
    manifest.save()
    return manifest


def merge_parts(task: PartTask, entries: Sequence[ArchiveEntry]) -> list[ArchiveEntry]:
    """Combine the summaries of all parts to one of each archive, and report archives that turn out to be empty.

    Args:
        task: the preparation of the parts.
        entries: the summary of every part, in stored order.
    """
    archives: list[ArchiveEntry] = []
    pairs = zip(task.parts, entries, strict=True)
    for number, group in itertools.groupby(pairs, key=lambda pair: pair[0].archive_number):
        parts = [entry for _, entry in group]
        problems = sum((Counter(part.problems) for part in parts), Counter[str]())
        examples = [example for part in parts for example in part.examples][:NUM_EXAMPLES]
        num_documents = sum(part.num_documents for part in parts)
        if not num_documents and not problems:  # A part alone cannot tell that its archive holds no record.
            empty = report_empty(relative(parts[0].path, resolve(task.source)[1]))
            with Losses(losses_name(f"{task.directory}/{_archive_name(number)}")) as losses:
                losses.add(parts[0].path, empty, problems, examples)
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
    return archives


def _list_losses_files(manifest: Manifest) -> list[str]:
    """Return the names of the files that list the lost records of a prepared data set, in stored order."""
    prepared: list[str] = []
    for number, archive in enumerate(manifest.archives):
        prepared += [part_name(number, part) for part in range(archive.num_parts)]
        if archive.num_parts > 1 and ProblemKind.EMPTY_ARCHIVE in archive.problems:
            prepared.append(_archive_name(number))
    return [losses_name(name) for name in prepared]


def _archive_name(number: int) -> str:
    return f"archive-{number:05d}"


def describe(manifest: Manifest, seconds: float | None = None) -> str:
    """Summarise the counts of a prepared data set in one line, for a human reader."""
    lost = ", ".join(f"{number} {kind}" for kind, number in sorted(manifest.problems.items())) or "none"
    duration = "" if seconds is None else f" in {seconds:.0f} s"
    return (
        f"{manifest.num_documents} documents, {manifest.layout.describe(manifest.num_rows, manifest.num_documents)}, "
        f"{manifest.num_tokens} tokens ({len(manifest.shards)} shards, digest {manifest.digest}){duration}; "
        f"unreadable: {lost}"
    )
