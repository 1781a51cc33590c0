"""Where SentEval (arXiv 1803.05449) stores the sentences of its small classification tasks, and how lines are parsed.

MR, CR, SUBJ, MPQA   two files, one per class, with one sentence per line                   10-fold cross-validation
SST2                 SST/binary/sentiment-{train,dev,test}: sentence, tab, label            the given split
TREC                 train_5500.label, TREC_10.label: `LABEL:detail question`                the given split
MRPC                 msr_paraphrase_{train,test}.txt: a header, then label, two numbers, two sentences, by tabs
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

Record = tuple[str, str, str | None]
"""Name of the class, the sentence, and the second sentence of a pair or None."""
Parser = Callable[[str], Record]
"""Function that turns a line into a record; it raises ValueError if the line is none."""


@dataclass(frozen=True, slots=True)
class TaskFiles:
    """Files of one of SentEval's tasks."""

    files: Mapping[str, tuple[str, ...]]
    """Files of each part of the task (`train`, `dev`, `test` or `all`)."""
    parse: tuple[Parser, ...]
    """One parser for each file of a part, in the order of the files."""
    class_names: tuple[str, ...]
    """Names of the classes."""
    num_header_lines: int = 0
    """Number of lines to skip at the start of each file."""


def _make_class_parser(name: str) -> Parser:
    return lambda line: (name, line, None)


def _make_two_files(negative: str, positive: str, class_names: tuple[str, str]) -> TaskFiles:
    return TaskFiles({"all": (negative, positive)}, tuple(map(_make_class_parser, class_names)), class_names)


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
