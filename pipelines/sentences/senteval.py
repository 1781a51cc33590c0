"""Labelled sentences in SentEval's own files (arXiv 1803.05449): small classification tasks, read whole.

    MR, CR, SUBJ, MPQA   two files, one a class, a sentence a line                              10-fold
    SST2                 SST/binary/sentiment-{train,dev,test}: sentence, tab, label            the given split
    TREC                 train_5500.label, TREC_10.label: `LABEL:detail question`                the given split
    MRPC                 msr_paraphrase_{train,test}.txt: a header, then label, two numbers, two sentences, by tabs

judgements of similarity, in files of score, sentence, sentence; and one's own classes, in a file of label, sentence and
perhaps a second sentence, by tabs.

Files are UTF-8 or, where they are not, latin-1, as some of these are. A line that is no record costs itself and is counted.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import numpy as np

from pipelines.problems import Problem, note


class LineProblemKind(StrEnum):
    """What can be wrong with a line."""

    MISSING_FIELD = "missing_field"
    EMPTY_SENTENCE = "empty_sentence"
    UNKNOWN_LABEL = "unknown_label"


@dataclass(frozen=True, slots=True)
class Examples:
    """Sentences, or pairs of them, with a class each."""

    first: list[str]
    second: list[str] | None
    """None: single sentences."""
    labels: np.ndarray
    """(n,) int64."""

    def __len__(self) -> int:
        return len(self.first)


@dataclass(frozen=True, slots=True, kw_only=True)
class SentenceTask:
    """One task."""

    name: str
    class_names: tuple[str, ...]
    parts: Mapping[str, Examples]
    """`train`, `test` and perhaps `dev` where the split is given; `all` where there is none."""
    problems: Mapping[str, int]
    examples: list[str]
    """Where the first few problems are."""

    @property
    def digest(self) -> str:
        """16 hex digits of all sentences and labels."""
        return _digest(
            [[name, part.first, part.second, part.labels.tolist()] for name, part in sorted(self.parts.items())]
        )

    @property
    def num_lines(self) -> int:
        """Readable or not."""
        return sum(map(len, self.parts.values())) + sum(self.problems.values())

    @property
    def has_split(self) -> bool:
        """Whether training and test sentences are told apart."""
        return "test" in self.parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgements:
    """Pairs of sentences, and how alike people found them."""

    name: str
    first: list[str]
    second: list[str]
    scores: np.ndarray
    """(n,) float64, the higher the more alike."""
    problems: Mapping[str, int]
    examples: list[str]

    @property
    def digest(self) -> str:
        """16 hex digits of all sentences and scores."""
        return _digest([self.first, self.second, self.scores.tolist()])

    @property
    def num_lines(self) -> int:
        """Readable or not."""
        return len(self.first) + sum(self.problems.values())


Record = tuple[str, str, str | None]  # class, sentence, second sentence
Parser = Callable[[str], Record]


@dataclass(frozen=True, slots=True)
class _Layout:
    files: Mapping[str, tuple[str, ...]]
    """Part → files."""
    parse: tuple[Parser, ...]
    """For the files of a part, in turn."""
    class_names: tuple[str, ...]
    num_header_lines: int = 0


def _of_class(name: str) -> Parser:
    return lambda line: (name, line, None)


def _two_files(negative: str, positive: str, class_names: tuple[str, str]) -> _Layout:
    return _Layout({"all": (negative, positive)}, tuple(map(_of_class, class_names)), class_names)


def _sentence_tab_label(line: str) -> Record:
    sentence, _, label = line.rpartition("\t")
    return label.strip(), sentence, None


def _label_colon_detail(line: str) -> Record:
    label, _, sentence = line.partition(" ")
    return label.partition(":")[0], sentence, None


def _paraphrase(line: str) -> Record:
    label, _, _, first, second = line.split("\t")
    return label, first, second


def _label_and_sentences(num_columns: int) -> Parser:
    def parse(line: str) -> Record:
        label, *sentences = line.split("\t")
        if len(sentences) != num_columns - 1:
            raise ValueError(f"{len(sentences) + 1} columns where the first line has {num_columns}")
        return label.strip(), sentences[0], sentences[1] if num_columns == 3 else None

    return parse


_POLARITY = ("negative", "positive")
_LAYOUTS: dict[str, _Layout] = {
    "MR": _two_files("MR/rt-polarity.neg", "MR/rt-polarity.pos", _POLARITY),
    "CR": _two_files("CR/custrev.neg", "CR/custrev.pos", _POLARITY),
    "SUBJ": _two_files("SUBJ/subj.objective", "SUBJ/subj.subjective", ("objective", "subjective")),
    "MPQA": _two_files("MPQA/mpqa.neg", "MPQA/mpqa.pos", _POLARITY),
    "SST2": _Layout(
        {part: (f"SST/binary/sentiment-{part}",) for part in ("train", "dev", "test")},
        (_sentence_tab_label,),
        ("0", "1"),
    ),
    "TREC": _Layout(
        {"train": ("TREC/train_5500.label",), "test": ("TREC/TREC_10.label",)},
        (_label_colon_detail,),
        ("ABBR", "DESC", "ENTY", "HUM", "LOC", "NUM"),
    ),
    "MRPC": _Layout(
        {part: (f"MRPC/msr_paraphrase_{part}.txt",) for part in ("train", "test")},
        (_paraphrase,),
        ("0", "1"),
        num_header_lines=1,
    ),
}

TASK_NAMES = tuple(_LAYOUTS)


def present_tasks(directory: str | Path) -> tuple[str, ...]:
    """The tasks whose folders are there.

    Raises:
        FileNotFoundError: if `directory` is none, or holds none.
    """
    if not Path(directory).is_dir():
        raise FileNotFoundError(f"{str(directory)!r} is no directory")
    found = tuple(name for name in TASK_NAMES if Path(directory, {"SST2": "SST"}.get(name, name)).is_dir())
    if not found:
        raise FileNotFoundError(f"{str(directory)!r} holds no folder of {', '.join(TASK_NAMES)}")
    return found


def read_task(directory: str | Path, name: str) -> SentenceTask:
    """Read one task.

    Args:
        directory: that holds the tasks' folders, as SentEval's `data/downstream`.
        name: of TASK_NAMES.

    Raises:
        ValueError: for another name, and where a class has no sentence at all.
        FileNotFoundError: naming the file.
    """
    if name not in _LAYOUTS:
        raise ValueError(f"task {name!r} is unknown: choose of {', '.join(TASK_NAMES)}")
    layout, problems, examples = _LAYOUTS[name], Counter[str](), list[str]()
    parts = {}
    for part, files in layout.files.items():
        records = [
            record
            for file, parse in zip(files, layout.parse, strict=True)
            for record in _records(
                Path(directory), file, parse, layout.class_names, problems, examples, layout.num_header_lines
            )
        ]
        parts[part] = _examples(records, layout.class_names, f"{name}, {' and '.join(files)}")
    return SentenceTask(
        name=name, class_names=layout.class_names, parts=parts, problems=dict(problems), examples=examples
    )


def read_labelled(path: str | Path, class_names: Sequence[str] = ()) -> SentenceTask:
    """Lines of label, sentence and, in all of them or in none, a second sentence, by tabs.

    Args:
        class_names: the labels there may be; another costs its line and is counted. Empty: those that occur.

    Raises:
        FileNotFoundError: naming the file.
        ValueError: for fewer than two classes, and where one of `class_names` has no sentence.
    """
    path = Path(path)
    problems, examples = Counter[str](), list[str]()
    num_columns = len(next(_lines(path), (0, ""))[1].split("\t"))
    if num_columns not in (2, 3):
        raise ValueError(
            f"{path}: the first line has {num_columns} columns: label, sentence and perhaps a second one needed"
        )
    parse = _label_and_sentences(num_columns)
    records = list(_records(path.parent, path.name, parse, class_names, problems, examples))
    names = tuple(class_names) or tuple(sorted({label for label, _, _ in records}))
    if len(names) < 2:
        raise ValueError(f"{path} holds {len(names)} class ({', '.join(names)}): a classifier needs two or more")
    return SentenceTask(
        name=path.stem,
        class_names=names,
        parts={"all": _examples(records, names, str(path))},
        problems=dict(problems),
        examples=examples,
    )


def read_judgements(path: str | Path, name: str) -> Judgements:
    """Lines of score, sentence, sentence, by tabs; of longer lines (STS benchmark's) the fifth to the seventh entry.

    A score that is empty, as in some of STS, leaves its line out without being a problem.

    Raises:
        FileNotFoundError: naming the file.
        ValueError: if it holds fewer than three pairs.
    """
    problems, examples = Counter[str](), list[str]()
    first, second, scores = [], [], []
    for number, line in _lines(Path(path)):
        entries = line.split("\t")
        score, *sentences = entries[4:7] if len(entries) >= 7 else entries
        if len(entries) >= 3 and not score.strip():
            continue
        try:
            one, other = sentences
            value = float(score)
        except ValueError as error:
            note(_problem(LineProblemKind.MISSING_FIELD, str(path), number, str(error)), problems, examples)
            continue
        if not (one.strip() and other.strip()):
            note(_problem(LineProblemKind.EMPTY_SENTENCE, str(path), number, repr(line[:40])), problems, examples)
            continue
        first.append(one.strip())
        second.append(other.strip())
        scores.append(value)
    if len(first) < 3:
        raise ValueError(f"{path} holds {len(first)} pairs of sentences with a score: a correlation needs 3 or more")
    return Judgements(
        name=name, first=first, second=second, scores=np.array(scores), problems=dict(problems), examples=examples
    )


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines of a file, from 1; what follows the last line break is one only if it is not empty."""
    lines = _decoded(path.read_bytes()).split("\n")
    for number, line in enumerate(lines, start=1):
        if line or number < len(lines):
            yield number, line.rstrip("\r")


def _digest(content: object) -> str:
    return hashlib.blake2b(json.dumps(content).encode(), digest_size=8).hexdigest()


def _examples(records: Sequence[Record], class_names: Sequence[str], where: str) -> Examples:
    labels = np.array([class_names.index(label) for label, _, _ in records], dtype=np.int64)
    if empty := [name for number, name in enumerate(class_names) if number not in labels]:
        raise ValueError(f"{where}: no sentence of the class {', '.join(sorted(empty))}")
    seconds = [second for _, _, second in records if second is not None]
    return Examples([first for _, first, _ in records], seconds or None, labels)


def _records(
    directory: Path,
    file: str,
    parse: Parser,
    class_names: Sequence[str],
    problems: Counter[str],
    examples: list[str],
    num_header_lines: int = 0,
) -> Iterator[Record]:
    for number, line in _lines(directory / file):
        if number <= num_header_lines:
            continue
        try:
            label, first, second = parse(line)
        except ValueError as error:
            note(_problem(LineProblemKind.MISSING_FIELD, file, number, str(error)), problems, examples)
            continue
        if not first.strip() or (second is not None and not second.strip()):
            note(_problem(LineProblemKind.EMPTY_SENTENCE, file, number, repr(line[:40])), problems, examples)
        elif not label or (class_names and label not in class_names):
            note(_problem(LineProblemKind.UNKNOWN_LABEL, file, number, repr(label)), problems, examples)
        else:
            yield label, first.strip(), None if second is None else second.strip()


def _problem(kind: LineProblemKind, file: str, number: int, detail: str) -> Problem:
    return Problem(kind=kind, where=f"{file}:{number}", detail=detail)


def _decoded(data: bytes) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return data.decode("latin-1")
