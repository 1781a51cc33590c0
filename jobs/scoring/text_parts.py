"""Texts for a language model: archives → parts of their documents → a pool of models, and the windows that a model reads.

A part is a group of documents of one archive, a unit of scoring, as an Arrow table with one row per document (`key`,
`token_ids`). How a document longer than the context is read is said in `pipelines.text.windows`.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import torch
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

from jobs.engine.export import model_digest
from jobs.engine.fields import absolute_path, values_of
from jobs.scoring.config import LanguageModelPool
from jobs.scoring.headroom.config import Headroom
from jobs.scoring.temperatures.config import PredictTemperaturesConfig
from jobs.scoring.units import Finished, Outcome, UnitStore, map_units, part_file
from jobs.tasks.base import naming_field
from pipelines.archives import PLAIN_SUFFIXES, SUFFIXES, Archive, describe_not_read, list_source, resolve_source
from pipelines.local_copy import checked_copy, local_copy
from pipelines.problems import check_problems
from pipelines.storage import create_directory, read_json, relative, write_json
from pipelines.text.manifest import ArchiveEntry
from pipelines.text.reading import Document, readable_documents
from pipelines.text.tokenization import document_start_id, load_tokenizer, tokenizer_digest
from pipelines.text.windows import default_stride
from tempnet.base_model import load_base, read_config
from tempnet.devices import input_device, loading_options, move_base
from tempnet.loading import load_causal_lm, load_tempnet
from tempnet.network import TempNet
from tempnet.weights import check_weight_files

logger = logging.getLogger(__name__)
_NOT_RECORDED = ("config", "archives", "known_text")
_READ_SCHEMA = pa.schema({"key": pa.string(), "token_ids": pa.list_(pa.int32())})


def list_sources(uri: str) -> list[Archive]:
    """Returns the files to read: a plain text or archive, or a directory's archives or, if it has none, its plain texts.

    A warning names the other files of the directory.
    """
    try:
        listing = list_source(uri, SUFFIXES)
    except (FileNotFoundError, ValueError):  # no archive, and no directory with any
        listing = list_source(uri, SUFFIXES | PLAIN_SUFFIXES)
    if listing.not_read:
        logger.warning("%s%s", uri, describe_not_read(listing.not_read))
    return listing.archives


def checked_model(
    path: str, field: str, *, trust_remote_code: bool = False
) -> tuple[PretrainedConfig, PreTrainedTokenizerFast]:
    """Returns the configuration and the tokenizer of a causal LM that can be loaded (OSError, ValueError)."""
    place = checked_copy(path, field)
    with naming_field(field):
        check_weight_files(place)
        base = read_config(place, trust_remote_code=trust_remote_code).get_text_config()
    tokenizer = load_tokenizer(path)
    if len(tokenizer) > base.vocab_size:
        raise ValueError(
            f"the tokenizer of {path} has {len(tokenizer)} tokens, the model a vocabulary of {base.vocab_size}"
        )
    return base, tokenizer


def checked_tempnet(
    place: str, field: str, model: str, base: PretrainedConfig, tokenizer: PreTrainedTokenizerFast
) -> TempNet:
    """Returns a TempNet that fits a model (OSError, ValueError)."""
    with naming_field(field):
        network = load_tempnet(local_copy(place))
    config = network.config
    if config.kind == "embeddings":
        raise ValueError(f"the TempNet {place} reads embeddings, not the logits of a language model")
    if config.input_size != len(tokenizer):
        raise ValueError(
            f"the TempNet {place} was built for a vocabulary of {config.input_size}, the tokenizer of {model} has "
            f"{len(tokenizer)} tokens"
        )
    if config.reads_state and config.state_size != base.hidden_size:
        raise ValueError(
            f"the TempNet {place} reads hidden states of {config.state_size} numbers, those of {model} have "
            f"{base.hidden_size}"
        )
    return network


def load_model(
    path: str, tempnet: str, dtype: str, workers: LanguageModelPool, **options: Any
) -> tuple[PreTrainedModel, TempNet | None]:
    """Returns a causal LM and, unless its name is empty, a TempNet, on the devices of a worker."""
    if workers.use_gpu and not torch.cuda.is_available():
        raise ValueError("workers.use_gpu = True: torch finds no CUDA device here")
    options |= {"device_map": workers.device_map, "fetch": local_copy}
    network: TempNet | None = None
    if tempnet:
        base, network = load_causal_lm(local_copy(path), local_copy(tempnet), dtype=dtype, **options)
    else:
        base = load_base(local_copy(path), **loading_options(dtype), **options).eval()
    base = move_base(base, "cuda" if workers.use_gpu else "cpu")
    return base, network and network.to(input_device(base))


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSettings:
    """How a text is read for a model."""

    format_version: ClassVar[int] = 2
    """Increased whenever the same settings would make other tables."""
    own_fields: ClassVar[tuple[str, ...]] = ()
    """Fields of the configuration that decide the tables, beside those of how a text is read."""
    config: Any
    """The configuration, without lengths that are left to the model. Local paths are absolute, because a worker has its own
    working directory."""
    archives: Sequence[Archive] = ()
    bos_id: int
    model_digest: str
    tokenizer_digest: str

    def record(self) -> dict[str, Any]:
        """Returns everything that decides the tables, as a flat mapping, without file locations and the batch size."""
        names = ("text_field", "max_documents", "part_characters", "context_length", "stride", "precision")
        values = {name: getattr(self.config, name) for name in names + self.own_fields}
        values |= {name: value for name, value in values_of(self, type(self)).items() if name not in _NOT_RECORDED}
        root = resolve_source(self.config.text)[1]
        versions = {
            f"archive {relative(archive.path, root)} (bytes, modified)": [archive.num_bytes, archive.modified_ns]
            for archive in self.archives
        }
        return {"version": self.format_version, **values, **versions}


def text_options(
    config: PredictTemperaturesConfig | Headroom, tokenizer: PreTrainedTokenizerFast, base: PretrainedConfig
) -> dict[str, Any]:
    """Returns the fields of `TextSettings` for a configuration, its tokenizer and its model's configuration."""
    longest = getattr(base, "max_position_embeddings", None)
    context_length = config.context_length or longest
    if context_length is None:
        raise ValueError(f"{config.model} does not say how many positions it reads: context_length is needed")
    stride = config.stride or default_stride(context_length)
    for name, value, most, what in (
        ("context_length", context_length, longest or context_length, f"positions of {config.model}"),
        ("stride", stride, context_length, "context length"),
    ):
        if value > most:
            raise ValueError(f"{name} = {value} must lie in 1 … {most}, the {what}")
    text, model = absolute_path(config.text), absolute_path(config.model)
    return {
        "config": replace(config, text=text, model=model, context_length=context_length, stride=stride),
        "bos_id": document_start_id(tokenizer),
        "model_digest": model_digest(config.model),
        "tokenizer_digest": tokenizer_digest(tokenizer),
    }


@dataclass(frozen=True, slots=True)
class Part:
    archive: int
    number: int
    source: str
    """Path of the archive, relative to what was read."""
    table: pa.Table

    @property
    def file(self) -> str:
        return part_file(self.archive, self.number)


def map_archives(
    settings: TextSettings, output: str, model: Callable[[], Callable[[Part], Finished]]
) -> tuple[list[ArchiveEntry], Outcome]:
    """Score the parts that the output lacks, and return the records of all archives.

    The record of an archive is written once it has been read to its end. The tables of parts depend neither on the number
    of workers nor on the order in which they are finished.
    """
    config, archives, store = settings.config, settings.archives, UnitStore(output)
    done = store.names()
    known = [_load_record(output, number) for number in range(len(archives))]
    missing = [
        number for number, record in enumerate(known) if record is None or not done.issuperset(_files(number, record))
    ]
    if len(missing) < len(archives):
        print(f"{output}: {len(archives) - len(missing)} of {len(archives)} archives are complete")
    root = resolve_source(config.text)[1]
    names = [relative(archive.path, root) for archive in archives]

    def read(number: int) -> Iterator[Part]:
        return read_parts(settings, number, output, done=done)

    outcome = map_units(missing, model, config.workers, store, read=read, title=names.__getitem__, noun="tokens")
    outcome.check()
    records = [record for number in range(len(archives)) if (record := _load_record(output, number)) is not None]
    check_problems(config.text, records, config.max_bad_share, field="max_bad_share")
    return records, outcome


def _load_record(output: str, number: int) -> ArchiveEntry | None:
    """Returns the record of an archive, or None if it was never read to its end."""
    values = read_json(f"{output}/_archives/archive-{number:05d}.json")
    return None if values is None else ArchiveEntry(**{**values["entry"], "num_parts": values["num_parts"]})


def _files(number: int, record: ArchiveEntry) -> list[str]:
    return [part_file(number, part) for part in range(record.num_parts)]


def part_files(records: Sequence[ArchiveEntry]) -> list[str]:
    """Returns the names of the tables of all archives, in order."""
    return [file for number, record in enumerate(records) for file in _files(number, record)]


def read_documents(
    config: Any, archives: Sequence[Archive], problems: Counter[str], examples: list[str]
) -> Iterator[Document]:
    """Yields the documents of archives, of each at most `max_documents`; problems and examples are updated in place."""
    for archive in archives:
        documents = readable_documents(config.text, archive, config.text_field, problems, examples)
        yield from itertools.islice(documents, config.max_documents or None)


def read_parts(
    settings: TextSettings, number: int, output: str, *, done: frozenset[str] = frozenset()
) -> Iterator[Part]:
    """Yields the tokenised parts of an archive, except those whose file name is in `done`; at its end, saves its record."""
    config, archive = settings.config, settings.archives[number]
    tokenizer = load_tokenizer(config.model)
    problems: Counter[str] = Counter()
    examples: list[str] = []
    num_documents = num_parts = 0
    source = relative(archive.path, resolve_source(config.text)[1])
    for group in _groups(read_documents(config, [archive], problems, examples), config.part_characters):
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
    create_directory(f"{output}/_archives")
    record = {"entry": asdict(entry), "num_parts": num_parts}
    write_json(f"{output}/_archives/archive-{number:05d}.json", record)


def tokenise(documents: list[Document], tokenizer: PreTrainedTokenizerFast) -> pa.Table:
    """Returns a table of the keys and token ids of documents, without special tokens."""
    texts = [document.text for document in documents]
    encodings = tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    ids = [np.asarray(encoding.ids, dtype=np.int32) for encoding in encodings]
    return pa.table({"key": [document.key for document in documents], "token_ids": ids}, schema=_READ_SCHEMA)


def token_arrays(column: pa.ChunkedArray) -> list[np.ndarray]:
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
