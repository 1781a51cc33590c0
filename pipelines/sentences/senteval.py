"""Read labelled sentences in the file formats of SentEval (arXiv 1803.05449), IMDb's reviews, and similarity judgements.

All files are read completely into memory. The classification tasks are

    MR, CR, SUBJ, MPQA   two files, one per class, with one sentence per line                   10-fold cross-validation
    IMDb                 aclImdb/{train,test}/{neg,pos}/*.txt, or aclImdb_v1.tar.gz as it is    the same, on both parts
    SST2, SST5           SST/{binary,fine}/sentiment-{train,dev,test}: sentence and label       the given split
    TREC                 train_5500.label, TREC_10.label: `LABEL:detail question`               the given split
    MRPC                 msr_paraphrase_{train,test}.txt: label, two numbers, two sentences     the given split
    SICKEntailment       SICK_{train,trial,test_annotated}.txt: number, pair, score, label      the given split
    SNLI                 {labels,s1,s2}.{train,dev,test}: line n of the three is a pair         the given split
    probing tasks        probing/*.txt: tr, va or te, label, sentence                           the given split

with columns separated by tabs. A directory is SentEval's `data/downstream`, or its `data`, which has the probing tasks too.
Its caption retrieval is not read: those files are pickles, which can run any code. Similarity judgements are those of
SentEval (`JUDGEMENT_FILES`), or a score and two sentences per line, separated by tabs. The user's own classification data
have a label, a sentence and optionally a second sentence per line, separated by tabs.

Files are decoded as UTF-8 or, if they are not valid UTF-8, as latin-1, which some of SentEval's files need. A line
that is not a valid record is skipped and counted.
"""

from __future__ import annotations

import itertools
import math
import re
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pipelines.archives import ArchiveFormat
from pipelines.lines import MAX_RECORD_BYTES, DamagedError, open_decompressed
from pipelines.local_copy import local_copy
from pipelines.problems import Problem, ProblemKind, note
from pipelines.storage import compute_digest
from pipelines.stream import Batch, row_digests
from pipelines.tars import tar_members

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Record = tuple[str, str, str | None]
"""Name of the class (or the score), the sentence, and the second sentence of a pair or None."""
Parser = Callable[[str], Record | None]
"""Function that turns a line into a record, or None to pass over it; it raises ValueError if the line is none."""


Source = tuple[tuple[str, ...], Parser]
"""Files, whose lines of the same number are joined by tabs, and the parser of such a line."""


@dataclass(frozen=True, slots=True)
class TaskFiles:
    """Files of one of the tasks."""

    parts: Mapping[str, tuple[Source, ...]]
    """Sources of each part: `train`, `test` and possibly `dev`; or `all`."""
    class_names: tuple[str, ...] = ()
    """Names of the classes. Empty: the labels of the training sentences."""
    num_header_lines: int = 0
    """Number of lines to skip at the start of each file."""


_PARTS = ("train", "dev", "test")


def _make_two_files(negative: str, positive: str, class_names: tuple[str, str] = ("negative", "positive")) -> TaskFiles:
    sources = [
        ((file,), partial(_parse_sentence, name)) for file, name in zip((negative, positive), class_names, strict=True)
    ]
    return TaskFiles({"all": tuple(sources)}, class_names)


def _make_split(
    files: str, parse: Parser, class_names: Sequence[str], parts: Sequence[str] = _PARTS, *, num_header_lines: int = 0
) -> TaskFiles:
    """Return a task with a split; the names of its parts, `train` and `test` or also `dev`, replace `{}` in the files."""
    names = dict(zip(_PARTS if len(parts) == 3 else ("train", "test"), parts, strict=True))
    sources = {part: ((tuple(file.format(name) for file in files.split()), parse),) for part, name in names.items()}
    return TaskFiles(sources, tuple(class_names), num_header_lines)


def _make_probing(file: str) -> TaskFiles:
    marks = {"train": "tr", "dev": "va", "test": "te"}

    def parser(own: str) -> Parser:
        def parse(line: str) -> Record | None:
            mark = line.partition("\t")[0]
            if mark not in marks.values() and own == "tr":  # so that it is counted once, not in every part
                raise ValueError(f"{mark[:20]!r} is none of tr, va, te")
            return _columns(3, 1, 2)(line) if mark == own else None

        return parse

    return TaskFiles({part: (((f"probing/{file}.txt",), parser(mark)),) for part, mark in marks.items()})


def _columns(count: int, label: int, first: int, second: int | None = None) -> Parser:
    """Return a parser of lines of `count` columns, which have the label and the sentences at these numbers, from 0."""

    def parse(line: str) -> Record:
        entries = line.split("\t")
        if len(entries) != count:
            raise ValueError(f"{len(entries)} columns instead of {count}")
        return entries[label].strip(), entries[first], None if second is None else entries[second]

    return parse


def _parse_sentence(label: str, line: str) -> Record:
    return label, line, None


def _parse_sentence_and_label(line: str) -> Record:
    sentence, _, label = line.rpartition("\t")
    return label.strip(), sentence, None


def _parse_label_and_question(line: str) -> Record:
    label, _, sentence = line.partition(" ")
    return label.partition(":")[0], sentence, None


PROBING_FILES = {
    "Length": "sentence_length",
    "WordContent": "word_content",
    "Depth": "tree_depth",
    "TopConstituents": "top_constituents",
    "BigramShift": "bigram_shift",
    "Tense": "past_present",
    "SubjNumber": "subj_number",
    "ObjNumber": "obj_number",
    "OddManOut": "odd_man_out",
    "CoordinationInversion": "coordination_inversion",
}
"""Name of a probing task → name of its file."""
_TREC = ("ABBR", "DESC", "ENTY", "HUM", "LOC", "NUM")
_SICK, _SICK_PARTS = ("CONTRADICTION", "NEUTRAL", "ENTAILMENT"), ("train", "trial", "test_annotated")
_SNLI = ("entailment", "neutral", "contradiction")
TASK_FILES: dict[str, TaskFiles] = {
    "MR": _make_two_files("MR/rt-polarity.neg", "MR/rt-polarity.pos"),
    "CR": _make_two_files("CR/custrev.neg", "CR/custrev.pos"),
    "SUBJ": _make_two_files("SUBJ/subj.objective", "SUBJ/subj.subjective", ("objective", "subjective")),
    "MPQA": _make_two_files("MPQA/mpqa.neg", "MPQA/mpqa.pos"),
    "IMDb": TaskFiles({"all": ()}, ("negative", "positive")),  # a file per review: `_Reader.reviews`
    "SST2": _make_split("SST/binary/sentiment-{}", _parse_sentence_and_label, "01"),
    "SST5": _make_split("SST/fine/sentiment-{}", _parse_label_and_question, "01234"),
    "TREC": _make_split("TREC/{}.label", _parse_label_and_question, _TREC, ("train_5500", "TREC_10")),
    "MRPC": _make_split(
        "MRPC/msr_paraphrase_{}.txt", _columns(5, 0, 3, 4), "01", ("train", "test"), num_header_lines=1
    ),
    "SICKEntailment": _make_split("SICK/SICK_{}.txt", _columns(5, 4, 1, 2), _SICK, _SICK_PARTS, num_header_lines=1),
    "SNLI": _make_split("SNLI/labels.{} SNLI/s1.{} SNLI/s2.{}", _columns(3, 0, 1, 2), _SNLI),
    **{name: _make_probing(file) for name, file in PROBING_FILES.items()},
}
_STS_SETS = {
    "STS12": "MSRpar MSRvid SMTeuroparl surprise.OnWN surprise.SMTnews",
    "STS13": "FNWN headlines OnWN",
    "STS14": "deft-forum deft-news headlines images OnWN tweet-news",
    "STS15": "answers-forums answers-students belief headlines images",
    "STS16": "answer-answer headlines plagiarism postediting question-question",
}
JUDGEMENT_FILES = {
    name: tuple(tuple(f"STS/{name}-en-test/STS.{kind}.{one}.txt" for kind in ("gs", "input")) for one in sets.split())
    for name, sets in _STS_SETS.items()
} | {"STSBenchmark": (("STS/STSBenchmark/sts-test.csv",),), "SICKRelatedness": (("SICK/SICK_test_annotated.txt",),)}
"""Name of judgements of SentEval → the files of each of their data sets: scores and pairs, or one file of test pairs."""
_REVIEWS, _REVIEWS_ARCHIVE, _NUM_REVIEWS = "aclImdb", "aclImdb_v1.tar.gz", 50_000
_REVIEW = re.compile(rf"{_REVIEWS}/(?:train|test)/(?:neg|pos)/[^/]+\.txt")


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
    sizes: tuple[int, ...] = ()
    """Number of pairs of each of the data sets, over which correlations are averaged; empty: they are one data set."""

    @property
    def digest(self) -> str:
        """Hash of all sentences and scores as 16 hex digits."""
        return compute_digest([self.first, self.second, self.scores.tolist(), *self.sizes])

    @property
    def num_lines(self) -> int:
        """Number of lines that should hold a judgement, readable or not; lines with an empty score are not counted."""
        return len(self.first) + sum(self.problems.values())


TASK_NAMES = tuple(TASK_FILES)
SENTEVAL_NAMES = (*(name for name in TASK_NAMES if name != "IMDb"), *JUDGEMENT_FILES)
"""SentEval's own tasks, and its judgements."""
FINE_TUNED_NAMES = ("MR", "CR", "SUBJ", "MPQA", "IMDb", "SST2", "TREC", "MRPC")
"""The tasks of TripleEntropy."""


def check_task(name: str, known: Sequence[str], field: str = "task ") -> None:
    """Check that the name of a task, in a field that the message names, is known."""
    if name == "ImageCaptionRetrieval":
        raise ValueError(
            f"{field}ImageCaptionRetrieval is not read: SentEval has its images and captions in COCO/*.pkl only, and "
            "reading a pickle can run any code"
        )
    if name not in known:
        raise ValueError(f"{field}{name!r} is unknown: choose one of {', '.join(known)}")


def present_tasks(directory: str | Path, names: Sequence[str]) -> tuple[str, ...]:
    """Return those of the names whose folders, or files of probing tasks, exist in `directory`."""
    if not Path(local_copy(str(directory))).is_dir():
        raise FileNotFoundError(f"{str(directory)!r} is no directory")

    def is_present(name: str) -> bool:
        if name == "IMDb":
            return any((_root(directory, name) / one).exists() for one in (_REVIEWS, _REVIEWS_ARCHIVE))
        is_judged = name in JUDGEMENT_FILES
        first = JUDGEMENT_FILES[name][0][0] if is_judged else next(iter(TASK_FILES[name].parts.values()))[0][0][0]
        file = _root(directory, name) / first
        return (file if name in PROBING_FILES else file.parent).exists()

    found = tuple(name for name in names if is_present(name))
    if not found:
        raise FileNotFoundError(f"{str(directory)!r} holds no folder of {', '.join(names)}")
    return found


def _root(directory: str | Path, name: str) -> Path:
    """Return the local directory of a task's files: SentEval's `data` has all but the probing tasks in `downstream`."""
    place = Path(local_copy(str(directory)))
    return place / "downstream" if name not in PROBING_FILES and (place / "downstream").is_dir() else place


def read_task(directory: str | Path, name: str) -> SentenceTask:
    """Read a classification task (TASK_NAMES) below a directory or URI such as SentEval's `data/downstream`."""
    check_task(name, TASK_NAMES)
    task, reader, place = TASK_FILES[name], _Reader(), _root(directory, name)
    parts, class_names = {}, task.class_names
    for part, sources in task.parts.items():
        records = [
            record
            for files, parse in sources
            for record in reader.records(place, files, parse, class_names, task.num_header_lines)
        ]
        records += reader.reviews(place) if name == "IMDb" else ()
        class_names = class_names or tuple(sorted({label for label, _, _ in records}))
        where = " and ".join(file for files, _ in sources for file in files) or _REVIEWS
        parts[part] = _collect_examples(records, class_names, f"{name}, {where}")
    return SentenceTask(
        name=name, class_names=class_names, parts=parts, problems=dict(reader.problems), examples=reader.examples
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

    parse = _columns(num_columns, 0, 1, 2 if num_columns == 3 else None)
    records = list(reader.records(path.parent, (path.name,), parse, class_names))
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


def read_senteval(directory: str | Path, name: str) -> SentenceTask | Judgements:
    """Read one of SentEval's tasks or judgements (SENTEVAL_NAMES) below a directory or URI."""
    files = JUDGEMENT_FILES.get(name)
    return read_judgements(_root(directory, name), name, files) if files else read_task(directory, name)


def read_judgements(path: str | Path, name: str, files: Sequence[tuple[str, ...]] = ()) -> Judgements:
    """Read similarity judgements from a file with a score and two sentences per line, separated by tabs.

    In lines of seven or more columns, as in the STS benchmark, these are the fifth to the seventh column, and scores lie in
    [0, 5]; in lines of ten, as GLUE has them, the tenth, the eighth and the ninth; in lines of five, as in SICK, the fourth,
    the second and the third. A line with an empty score, as in some STS files, and one that names columns are skipped and
    are no problems. Fewer than three pairs raise ValueError. With `files`, they are those of data sets in the directory
    `path`.
    """
    place = Path(local_copy(str(path)))
    place, sets = (place, files) if files else (place.parent, [(place.name,)])

    def parse(line: str) -> Record | None:
        entries = line.split("\t")
        columns = entries[4:7] if len(entries) >= 7 else entries
        if chosen := {5: (3, 1, 2), 10: (9, 7, 8)}.get(len(entries)):
            columns = [entries[number] for number in chosen]
        score, *sentences = columns
        if len(entries) >= 3 and score.strip() in ("", "score"):
            return None
        first, second = sentences
        if not (0 <= float(score) <= 5 if len(entries) >= 7 else math.isfinite(float(score))):
            raise ValueError(f"the score {score!r} must be finite, and that of the STS benchmark lie in 0 … 5")
        return str(float(score)), first, second

    reader, records, sizes = _Reader(), list[Record](), list[int]()
    for names in sets:
        found = list(reader.records(place, names, parse, (), int(bool(files) and name == "SICKRelatedness")))
        if len(found) < 3:
            where = f"{place / names[-1]} holds {len(found)} pairs of sentences with a score"
            raise ValueError(f"{where}: a correlation needs 3 or more")
        records += found
        sizes.append(len(found))
    return Judgements(
        name=name,
        first=[first for _, first, _ in records],
        second=[str(second) for _, _, second in records],
        scores=np.array([float(score) for score, _, _ in records]),
        problems=dict(reader.problems),
        examples=reader.examples,
        sizes=tuple(sizes) if len(sizes) > 1 else (),
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
        self,
        directory: Path,
        files: Sequence[str],
        parse: Parser,
        class_names: Sequence[str],
        num_header_lines: int = 0,
    ) -> Iterator[Record]:
        """Yield the records of a file, or of files whose lines of the same number are joined by tabs."""
        columns = [list(itertools.islice(_read_lines(directory / one), num_header_lines, None)) for one in files]
        if len({len(lines) for lines in columns}) > 1:
            sizes = ", ".join(f"{file} {len(lines)}" for file, lines in zip(files, columns, strict=True))
            raise ValueError(f"files that belong together have different numbers of lines: {sizes}")
        for lines in zip(*columns, strict=True):
            where = f"{files[0]}:{lines[0][0]}"
            try:
                record = parse("\t".join(line for _, line in lines))
            except ValueError as error:
                self._skip(ProblemKind.MISSING_FIELD, where, str(error))
                continue
            if record is not None and self._is_whole(record, where, class_names):
                label, first, second = record
                yield label, first.strip(), None if second is None else second.strip()

    def reviews(self, directory: Path) -> Iterator[Record]:
        """Yield IMDb's reviews, in the order of their names, from its folder or else from the archive itself."""
        place = directory / _REVIEWS
        if place.is_dir():
            files = {path.relative_to(directory).as_posix(): path for path in place.glob("t*/[np]*/*.txt")}
            reviews = {name: path.read_bytes() for name, path in files.items() if _REVIEW.fullmatch(name)}
        else:
            reviews = self._read_archive(directory / _REVIEWS_ARCHIVE)
        for name, content in sorted(reviews.items()):
            label = "positive" if "/pos/" in name else "negative"
            record = label, _decode(content).strip(), None
            if self._is_whole(record, name, ()):
                yield record

    def _read_archive(self, path: Path) -> dict[str, bytes]:
        """Return the reviews in the archive by name; if it cannot be read to its end, those that are missing are counted."""
        reviews: dict[str, bytes] = {}
        with path.open("rb") as file:
            try:
                for info, member in tar_members(open_decompressed(file, 0, ArchiveFormat.JSONL_GZ)):
                    name = info.name.removeprefix("./")
                    if not _REVIEW.fullmatch(name):
                        continue
                    if not info.isreg() or info.size > MAX_RECORD_BYTES:
                        self._skip(ProblemKind.UNREAD_REVIEW, name, "no plain file of a review's size")
                        continue
                    content = member.read(info.size)
                    if not member.is_cut:
                        reviews[name] = content
            except (DamagedError, tarfile.TarError) as error:
                self._skip(ProblemKind.UNREAD_REVIEW, path.name, str(error), max(1, _NUM_REVIEWS - len(reviews)))
        return reviews

    def _is_whole(self, record: Record, where: str, class_names: Sequence[str]) -> bool:
        """Return whether a record has all that it needs; otherwise it is counted."""
        label, first, second = record
        if not first.strip() or (second is not None and not second.strip()):
            self._skip(ProblemKind.EMPTY_SENTENCE, where, repr(first[:40]))
        elif not label or (class_names and label not in class_names):
            self._skip(ProblemKind.UNKNOWN_LABEL, where, repr(label))
        else:
            return True
        return False

    def _skip(self, kind: ProblemKind, where: str, detail: str, count: int = 1) -> None:
        note(Problem(kind, where, detail, count=count), self.problems, self.examples)


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
        whole = tokenizer(*pairs, verbose=False)["input_ids"]
        encoded = tokenizer(
            *pairs,
            truncation=True,
            max_length=num_tokens,
            padding=True,
            padding_side="right",
            return_token_type_ids=True,
            return_attention_mask=True,
            return_tensors="np",
        )
        lengths = encoded["attention_mask"].sum(axis=1).astype(np.int64)
        has_types = "token_type_ids" in tokenizer.model_input_names
        return cls(
            token_ids=encoded["input_ids"].astype(np.int32),
            token_types=encoded["token_type_ids"].astype(np.int8) if has_types else None,
            lengths=lengths,
            labels=examples.labels,
            num_cut=sum(len(long) > length for long, length in zip(whole, lengths, strict=True)),
        )

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, rows: np.ndarray) -> LabelledSource:
        """Return a source of the examples in some rows."""
        types = None if self.token_types is None else self.token_types[rows]
        arrays = {"token_ids": self.token_ids[rows], "lengths": self.lengths[rows], "labels": self.labels[rows]}
        return replace(self, token_types=types, **arrays)

    def read(self, shards: np.ndarray, rows: np.ndarray, epoch: int) -> Batch:
        """Return n examples by row number; they are the same in every epoch.

        `input_ids` (n, t); `token_type_ids` (n, t), if the model uses them; `lengths`, `labels`, `ids` (the row numbers) and
        `digest` (a 48-bit hash of tokens and label), each (n,).
        """
        rows = np.asarray(rows)
        pairs = zip(self.token_ids[rows], self.labels[rows] % 256, strict=True)
        types = {} if self.token_types is None else {"token_type_ids": self.token_types[rows]}
        return types | {
            "input_ids": self.token_ids[rows],
            "lengths": self.lengths[rows],
            "labels": self.labels[rows],
            "ids": rows.astype(np.int64),
            "digest": row_digests(tokens.tobytes() + bytes([label]) for tokens, label in pairs),
        }

    def name(self, shard: int, row: int) -> str:
        """Return the row number and the class of an example, for messages."""
        return f"training sentence {row} of class {self.labels[row]}"
