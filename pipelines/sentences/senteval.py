"""Read labelled sentences in the file formats of SentEval (arXiv 1803.05449), and similarity judgements.

Three kinds of files are read completely into memory. The first kind is SentEval's small classification tasks:

    MR, CR, SUBJ, MPQA   two files, one per class, with one sentence per line                   10-fold cross-validation
    SST2                 SST/binary/sentiment-{train,dev,test}: sentence, tab, label            the given split
    TREC                 train_5500.label, TREC_10.label: `LABEL:detail question`                the given split
    MRPC                 msr_paraphrase_{train,test}.txt: a header, then label, two numbers, two sentences, by tabs

The second kind is similarity judgements, with a score and two sentences per
line, separated by tabs. The third kind is the user's own classification data, with a label, a sentence and optionally
a second sentence per line, separated by tabs.

Files are decoded as UTF-8 or, if they are not valid UTF-8, as latin-1, which some of SentEval's files need. A line
that is not a valid record is skipped and counted.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pipelines.local_copy import local_copy
from pipelines.problems import Problem, note
from pipelines.storage import compute_digest
from pipelines.stream import Batch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Record = tuple[str, str, str | None]
"""Name of the class (or the score), the sentence, and the second sentence of a pair or None."""
Parser = Callable[[str], Record | None]
"""Function that turns a line into a record, or None to pass over it; it raises ValueError if the line is none."""


@dataclass(frozen=True, slots=True)
class TaskFiles:
    """Files of each part (`train`, `dev`, `test` or `all`) of one of SentEval's tasks, with a parser for each of them."""

    files: Mapping[str, tuple[str, ...]]
    parse: tuple[Parser, ...]
    class_names: tuple[str, ...]
    num_header_lines: int = 0
    """Number of lines to skip at the start of each file."""


def _make_two_files(negative: str, positive: str, class_names: tuple[str, str]) -> TaskFiles:
    parsers: tuple[Parser, ...] = tuple(lambda line, name=name: (name, line, None) for name in class_names)  # type: ignore[misc]
    return TaskFiles({"all": (negative, positive)}, parsers, class_names)


def _parse_sentence_and_label(line: str) -> Record:
    sentence, _, label = line.rpartition("\t")
    return label.strip(), sentence, None


def _parse_label_and_question(line: str) -> Record:
    label, _, sentence = line.partition(" ")
    return label.partition(":")[0], sentence, None


def _parse_paraphrase(line: str) -> Record:
    label, _, _, first, second = line.split("\t")
    return label, first, second


_POLARITY = ("negative", "positive")
TASK_FILES: dict[str, TaskFiles] = {
    "MR": _make_two_files("MR/rt-polarity.neg", "MR/rt-polarity.pos", _POLARITY),
    "CR": _make_two_files("CR/custrev.neg", "CR/custrev.pos", _POLARITY),
    "SUBJ": _make_two_files("SUBJ/subj.objective", "SUBJ/subj.subjective", ("objective", "subjective")),
    "MPQA": _make_two_files("MPQA/mpqa.neg", "MPQA/mpqa.pos", _POLARITY),
    "SST2": TaskFiles(
        {part: (f"SST/binary/sentiment-{part}",) for part in ("train", "dev", "test")},
        (_parse_sentence_and_label,),
        ("0", "1"),
    ),
    "TREC": TaskFiles(
        {"train": ("TREC/train_5500.label",), "test": ("TREC/TREC_10.label",)},
        (_parse_label_and_question,),
        ("ABBR", "DESC", "ENTY", "HUM", "LOC", "NUM"),
    ),
    "MRPC": TaskFiles(
        {part: (f"MRPC/msr_paraphrase_{part}.txt",) for part in ("train", "test")},
        (_parse_paraphrase,),
        ("0", "1"),
        num_header_lines=1,
    ),
}


class LineProblemKind(StrEnum):
    """Kinds of problems with a line."""

    MISSING_FIELD = "missing_field"
    EMPTY_SENTENCE = "empty_sentence"
    UNKNOWN_LABEL = "unknown_label"


@dataclass(frozen=True, slots=True)
class Examples:
    """n sentences, or pairs of sentences (`second` is not None), with one class each."""

    first: list[str]
    second: list[str] | None
    labels: np.ndarray
    """Class of each example as an index into the task's class names: (n,) int64."""

    def __len__(self) -> int:
        return len(self.first)


@dataclass(frozen=True, slots=True, kw_only=True)
class SentenceTask:
    """One classification task."""

    name: str
    class_names: tuple[str, ...]
    parts: Mapping[str, Examples]
    """Examples by split: `train`, `test` and possibly `dev` if the task defines a split, otherwise only `all`."""
    problems: Mapping[str, int]
    examples: list[str]

    @property
    def digest(self) -> str:
        """Hash of all sentences and labels as 16 hex digits."""
        return compute_digest(
            [[name, part.first, part.second, part.labels.tolist()] for name, part in sorted(self.parts.items())]
        )

    @property
    def num_lines(self) -> int:
        """Number of lines that should hold a record, whether readable or not."""
        return sum(map(len, self.parts.values())) + sum(self.problems.values())

    @property
    def has_split(self) -> bool:
        """Whether the task defines a split into training and test sentences."""
        return "test" in self.parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgements:
    """n pairs of sentences, with human judgements of their similarity."""

    name: str
    first: list[str]
    second: list[str]
    scores: np.ndarray
    """Similarity of each pair, where a higher score means more similar: (n,) float64."""
    problems: Mapping[str, int]
    examples: list[str]

    @property
    def digest(self) -> str:
        """Hash of all sentences and scores as 16 hex digits."""
        return compute_digest([self.first, self.second, self.scores.tolist()])

    @property
    def num_lines(self) -> int:
        """Number of lines that should hold a judgement, readable or not; lines with an empty score are not counted."""
        return len(self.first) + sum(self.problems.values())


TASK_NAMES = tuple(TASK_FILES)


def present_tasks(directory: str | Path) -> tuple[str, ...]:
    """Return the names of the tasks whose folders exist in `directory`."""
    place = Path(local_copy(str(directory)))
    if not place.is_dir():
        raise FileNotFoundError(f"{str(directory)!r} is no directory")
    names = tuple(name for name in TASK_NAMES if Path(place, {"SST2": "SST"}.get(name, name)).is_dir())
    if not names:
        raise FileNotFoundError(f"{str(directory)!r} holds no folder of {', '.join(TASK_NAMES)}")
    return names


def read_task(directory: str | Path, name: str) -> SentenceTask:
    """Read one of SentEval's classification tasks (TASK_NAMES) below a directory or URI such as its `data/downstream`."""
    if name not in TASK_FILES:
        raise ValueError(f"task {name!r} is unknown: choose one of {', '.join(TASK_NAMES)}")
    task, reader, place = TASK_FILES[name], _Reader(), Path(local_copy(str(directory)))
    parts = {}
    for part, files in task.files.items():
        records = [
            record
            for file, parse in zip(files, task.parse, strict=True)
            for record in reader.records(place, file, parse, task.class_names, task.num_header_lines)
        ]
        parts[part] = _collect_examples(records, task.class_names, f"{name}, {' and '.join(files)}")
    return SentenceTask(
        name=name,
        class_names=task.class_names,
        parts=parts,
        problems=dict(reader.problems),
        examples=reader.examples,
    )


def read_labelled(path: str | Path, class_names: Sequence[str] = ()) -> SentenceTask:
    """Read a classification task from a file with a label, a sentence and optionally a second sentence per line, by tabs.

    Either all lines have a second sentence or none. A line whose label is not among `class_names` is skipped and counted;
    if these are empty, all labels that occur are classes.

    Raises:
        FileNotFoundError: if the file is missing; the message names it.
        ValueError: if the first line does not have two or three columns, if there are fewer than two classes, or if
            one of `class_names` has no sentence.
    """
    path = Path(local_copy(str(path)))
    reader = _Reader()
    num_columns = len(next(_read_lines(path), (0, ""))[1].split("\t"))
    if num_columns not in (2, 3):
        raise ValueError(
            f"{path}: the first line has {num_columns} columns; expected a label, a sentence and optionally a second sentence"
        )

    def parse(line: str) -> Record:
        label, *sentences = line.split("\t")
        if len(sentences) != num_columns - 1:
            raise ValueError(f"{len(sentences) + 1} columns where the first line has {num_columns}")
        return label.strip(), sentences[0], sentences[1] if num_columns == 3 else None

    records = list(reader.records(path.parent, path.name, parse, class_names))
    names = tuple(class_names) or tuple(sorted({label for label, _, _ in records}))
    if len(names) < 2:
        raise ValueError(f"{path} holds {len(names)} class ({', '.join(names)}): a classifier needs two or more")
    return SentenceTask(
        name=path.stem,
        class_names=names,
        parts={"all": _collect_examples(records, names, str(path))},
        problems=dict(reader.problems),
        examples=reader.examples,
    )


def read_judgements(path: str | Path, name: str) -> Judgements:
    """Read similarity judgements from a file with a score and two sentences per line, separated by tabs.

    In lines of seven or more columns, as in the STS benchmark, these are the fifth to the seventh column. A line with
    an empty score, as in some STS files, is skipped and is not a problem. Fewer than three pairs raise ValueError.
    """

    def parse(line: str) -> Record | None:
        entries = line.split("\t")
        score, *sentences = entries[4:7] if len(entries) >= 7 else entries
        if len(entries) >= 3 and not score.strip():
            return None
        first, second = sentences
        return str(float(score)), first, second

    reader, place = _Reader(), Path(local_copy(str(path)))
    records = list(reader.records(place.parent, place.name, parse))
    if len(records) < 3:
        raise ValueError(f"{path} holds {len(records)} pairs of sentences with a score: a correlation needs 3 or more")
    return Judgements(
        name=name,
        first=[first for _, first, _ in records],
        second=[str(second) for _, _, second in records],
        scores=np.array([float(score) for score, _, _ in records]),
        problems=dict(reader.problems),
        examples=reader.examples,
    )


def _read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a file and their numbers, from 1; text after the last line break counts unless it is empty."""
    lines = _decode(path.read_bytes()).split("\n")
    for number, line in enumerate(lines, start=1):
        if line or number < len(lines):
            yield number, line.rstrip("\r")


def _collect_examples(records: Sequence[Record], class_names: Sequence[str], where: str) -> Examples:
    labels = np.array([class_names.index(label) for label, _, _ in records], dtype=np.int64)
    if empty := [name for number, name in enumerate(class_names) if number not in labels]:
        raise ValueError(f"{where}: no sentence of the class {', '.join(sorted(empty))}")
    seconds = [second for _, _, second in records if second is not None]
    return Examples([first for _, first, _ in records], seconds or None, labels)


class _Reader:
    """Reads the records of files, and counts the lines that are none."""

    def __init__(self) -> None:
        self.problems, self.examples = Counter[str](), list[str]()

    def records(
        self, directory: Path, file: str, parse: Parser, class_names: Sequence[str] = (), num_header_lines: int = 0
    ) -> Iterator[Record]:
        for number, line in itertools.islice(_read_lines(directory / file), num_header_lines, None):
            try:
                if (record := parse(line)) is None:
                    continue
            except ValueError as error:
                self._skip(LineProblemKind.MISSING_FIELD, f"{file}:{number}", str(error))
                continue
            label, first, second = record
            if not first.strip() or (second is not None and not second.strip()):
                self._skip(LineProblemKind.EMPTY_SENTENCE, f"{file}:{number}", repr(line[:40]))
            elif not label or (class_names and label not in class_names):
                self._skip(LineProblemKind.UNKNOWN_LABEL, f"{file}:{number}", repr(label))
            else:
                yield label, first.strip(), None if second is None else second.strip()

    def _skip(self, kind: LineProblemKind, where: str, detail: str) -> None:
        note(Problem(kind=kind, where=where, detail=detail), self.problems, self.examples)


def _decode(data: bytes) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return data.decode("latin-1")


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelledSource:
    """Source of labelled sentences or sentence pairs, all in one shard (see `pipelines.stream.Source`).

    It can be pickled.
    """

    token_ids: np.ndarray
    """Token ids, padded and including special tokens: (N, t) int32."""
    token_types: np.ndarray | None
    """Token types, 1 in the second sentence of a pair: (N, t) int8; None if the model does not use them."""
    lengths: np.ndarray
    """Number of tokens of each example, including special tokens: (N,) int64."""
    labels: np.ndarray
    """Class of each example: (N,) int64."""
    num_cut: int
    """Number of examples that were truncated to t tokens."""

    @classmethod
    def of(cls, examples: Examples, tokenizer: PreTrainedTokenizerFast, *, num_tokens: int) -> LabelledSource:
        """Tokenise examples; one of more than `num_tokens` is truncated, a pair by shortening the longer sentence."""
        pairs = [examples.first] if examples.second is None else [examples.first, examples.second]
        whole = tokenizer(*pairs, verbose=False)
        encoded = tokenizer(*pairs, truncation=True, max_length=num_tokens, return_token_type_ids=True)
        rows, types = encoded["input_ids"], encoded["token_type_ids"]
        lengths = np.array([len(row) for row in rows], dtype=np.int64)
        token_ids = np.full((len(rows), lengths.max()), tokenizer.pad_token_id, dtype=np.int32)
        has_types = "token_type_ids" in tokenizer.model_input_names
        token_types = np.zeros_like(token_ids, dtype=np.int8)
        for place, (row, kinds) in enumerate(zip(rows, types, strict=True)):
            token_ids[place, : len(row)] = row
            token_types[place, : len(row)] = kinds
        return cls(
            token_ids=token_ids,
            token_types=token_types if has_types else None,
            lengths=lengths,
            labels=examples.labels,
            num_cut=sum(len(long) > len(row) for long, row in zip(whole["input_ids"], rows, strict=True)),
        )

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, rows: np.ndarray) -> LabelledSource:
        """Return a source of the examples in some rows."""
        return LabelledSource(
            token_ids=self.token_ids[rows],
            token_types=None if self.token_types is None else self.token_types[rows],
            lengths=self.lengths[rows],
            labels=self.labels[rows],
            num_cut=self.num_cut,
        )

    def read(self, shards: np.ndarray, rows: np.ndarray, epoch: int) -> Batch:
        """Return n examples by row number; they are the same in every epoch.

        `input_ids` (n, t); `token_type_ids` (n, t), if the model uses them; `lengths`, `labels`, `ids` (the row numbers) and
        `digest` (a 48-bit hash of tokens and label), each (n,).
        """
        rows = np.asarray(rows)
        digest = [
            int.from_bytes(hashlib.blake2b(tokens.tobytes() + bytes([label]), digest_size=6).digest(), "little")
            for tokens, label in zip(self.token_ids[rows], self.labels[rows] % 256, strict=True)
        ]
        types = {} if self.token_types is None else {"token_type_ids": self.token_types[rows]}
        return types | {
            "input_ids": self.token_ids[rows],
            "lengths": self.lengths[rows],
            "labels": self.labels[rows],
            "ids": rows.astype(np.int64),
            "digest": np.array(digest, dtype=np.int64),
        }

    def name(self, shard: int, row: int) -> str:
        """Return the row number and the class of an example, for messages."""
        return f"training sentence {row} of class {self.labels[row]}"
