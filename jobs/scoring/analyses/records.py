"""Read the records of an analysis: texts in groups."""

from __future__ import annotations

import csv
import io
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from pyarrow.fs import FileType

from pipelines.archives import list_once
from pipelines.lines import decode
from pipelines.storage import read_bytes, resolve

_MAX_FIELD_CHARACTERS = 1 << 22
_NOT_ANSWERED = "ANSWERNOTFOUND"
_LEVELS = {"question": "question_subj_level", "answer": "answer_subj_level"}
_POLITE = re.compile(r"^(?:please|kindly|(?:can|could|would) you(?: please)?)\s+", re.IGNORECASE)
_OTHER_FIRST_WORDS = """
a an the this that these those my your our their his her its i you we he she it they who whom whose what which when where
why how if in on at for from of to with without by as and or but not no yes there here is are was were am do does did has
have had can could would will shall should may might must given using based some any each every all one two three after
before during while because according sentence text
"""
_NO_VERBS = frozenset(_OTHER_FIRST_WORDS.split())


@dataclass(frozen=True, slots=True)
class Record:
    """A text, and the group that it belongs to."""

    text: str
    group: str


@dataclass(frozen=True, slots=True)
class Records:
    """The records of an analysis, the groups in their order, and what was left out."""

    records: list[Record]
    groups: list[str]
    left_out: Counter[str]
    """Number of records that were left out, by reason."""
    has_order: bool
    """Whether the order of the groups means something, so that a rank correlation with it does."""


def read_subjectivity(data: str, by: Literal["question", "answer"]) -> Records:
    """Read SubjQA: the text of a record is the question and the answer's span; groups go from objective to subjective.

    Raises:
        FileNotFoundError: if there is no CSV file.
        ValueError: naming the file, if it is no CSV of SubjQA, or if no record is left.
    """
    records: list[Record] = []
    left_out: Counter[str] = Counter()
    for path in _csv_files(data):
        for row in _csv_rows(path, {"question", "human_ans_spans", _LEVELS[by]}):
            # A row that is too short has None in the place of what it lacks.
            question, answer, level = (
                (row[name] or "").strip() for name in ("question", "human_ans_spans", _LEVELS[by])
            )
            if not question:
                left_out["without a question"] += 1
            elif not answer or answer == _NOT_ANSWERED:
                left_out["without an answer"] += 1
            elif level not in set("12345"):
                left_out["without a level from 1 to 5"] += 1
            else:
                records.append(Record(f"{question}\n{answer}", _group_of_level(level)))
    return _checked(records, [_group_of_level(level) for level in "54321"], left_out, data, has_order=True)


def read_instructions(data: str, num_verbs: int) -> Records:
    """Read Alpaca's records: the text is instruction, input and output, the group the verb that the instruction begins with.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it holds no list of such records, or no record is left.
    """
    records: list[Record] = []
    left_out: Counter[str] = Counter()
    for entry in _json_list(data):
        parts = [entry.get(name, "") for name in ("instruction", "input", "output")] if isinstance(entry, dict) else []
        if not parts or not all(isinstance(part, str) for part in parts) or not parts[0].strip():
            left_out["not a record of Alpaca"] += 1
        elif verb := first_verb(parts[0]):
            records.append(Record("\n".join(part.strip() for part in parts if part.strip()), verb))
        else:
            left_out["not begun with a verb"] += 1
    counts = Counter(record.group for record in records)
    verbs = [verb for verb, _ in counts.most_common(num_verbs)]
    kept = [record for record in records if record.group in set(verbs)]
    left_out[f"not begun with one of the {num_verbs} most frequent verbs"] = len(records) - len(kept)
    return _checked(kept, verbs, left_out, data, has_order=False)


def first_verb(instruction: str) -> str:
    """Return the first word of an instruction in lower case if it can be a verb, else an empty text.

    Words that begin a question or a noun phrase are no verbs; polite phrases before the verb do not count.
    """
    match = re.match(r"[A-Za-z]+", _POLITE.sub("", instruction.strip()))
    word = match.group().lower() if match else ""
    return "" if word in _NO_VERBS else word


def _group_of_level(level: str) -> str:
    names = {"1": "1, most subjective", "5": "5, least subjective"}
    return names.get(level, level)


def _checked(
    records: list[Record], groups: list[str], left_out: Counter[str], data: str, *, has_order: bool
) -> Records:
    used = {record.group for record in records}
    if len(used) < 2:
        reasons = ", ".join(f"{count} {reason}" for reason, count in left_out.items() if count) or "there are no others"
        raise ValueError(
            f"data = {data} has {len(records)} records in {len(used)} groups, and 2 are needed; left out: {reasons}"
        )
    return Records(records, [group for group in groups if group in used], +left_out, has_order)


def _csv_files(data: str) -> list[str]:
    filesystem, path = resolve(data)
    info = filesystem.get_file_info(path)
    if info.type is FileType.NotFound:
        raise FileNotFoundError(f"data = {data}: there is no such file or directory")
    if info.type is FileType.File:
        return [data]
    entries = list_once(filesystem, path)
    files = sorted(entry.path for entry in entries if entry.type is FileType.File and entry.extension.lower() == "csv")
    if not files:
        raise FileNotFoundError(f"data = {data} holds no .csv file")
    prefix = data.rstrip("/")
    return [f"{prefix}/{file[len(path.rstrip('/')) + 1 :]}" for file in files]


def _csv_rows(path: str, needed: set[str]) -> Iterator[dict[str, Any]]:
    csv.field_size_limit(_MAX_FIELD_CHARACTERS)
    try:
        reader = csv.DictReader(io.StringIO(decode(read_bytes(path))))
        if missing := sorted(needed - set(reader.fieldnames or ())):
            raise ValueError(f"{path} is no file of SubjQA: it has no column {', '.join(missing)}")
        yield from reader
    except (csv.Error, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read as CSV in UTF-8: {error}") from error


def _json_list(path: str) -> list[Any]:
    try:
        entries = json.loads(read_bytes(path))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"data = {path} is no JSON file: {error}") from error
    if not isinstance(entries, list):
        raise ValueError(f"data = {path} holds no list of records")
    return entries
