"""Labelled sentences in SentEval's own files (arXiv 1803.05449): small classification tasks, read whole.

    MR, CR, SUBJ, MPQA   two files, one a class, a sentence a line                              10-fold
    SST2                 SST/binary/sentiment-{train,dev,test}: sentence, tab, label            the given split
    TREC                 train_5500.label, TREC_10.label: `LABEL:detail question`                the given split
    MRPC                 msr_paraphrase_{train,test}.txt: a header, then label, two numbers, two sentences, by tabs

and judgements of similarity, in files of score, sentence, sentence.

Files are UTF-8 or, where they are not, latin-1, as some of these are. A line that is no record costs itself and is counted.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
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
            for record in _records(Path(directory), file, parse, layout, problems, examples)
        ]
        labels = np.array([layout.class_names.index(label) for label, _, _ in records], dtype=np.int64)
        seconds = [second for _, _, second in records if second is not None]
        parts[part] = Examples([first for _, first, _ in records], seconds or None, labels)
        if empty := [layout.class_names[c] for c in set(range(len(layout.class_names))) - set(labels.tolist())]:
            raise ValueError(f"{name}, {' and '.join(files)}: no sentence of the class {', '.join(sorted(empty))}")
    return SentenceTask(
        name=name, class_names=layout.class_names, parts=parts, problems=dict(problems), examples=examples
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


def _records(
    directory: Path, file: str, parse: Parser, layout: _Layout, problems: Counter[str], examples: list[str]
) -> Iterator[Record]:
    for number, line in _lines(directory / file):
        if number <= layout.num_header_lines:
            continue
        try:
            label, first, second = parse(line)
        except ValueError as error:
            note(_problem(LineProblemKind.MISSING_FIELD, file, number, str(error)), problems, examples)
            continue
        if not first.strip() or (second is not None and not second.strip()):
            note(_problem(LineProblemKind.EMPTY_SENTENCE, file, number, repr(line[:40])), problems, examples)
        elif label not in layout.class_names:
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
