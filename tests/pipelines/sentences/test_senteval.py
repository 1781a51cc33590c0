"""SentEval's files as they are: encodings, labels, splits, and lines that are no records."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from pipelines.sentences.senteval import TASK_NAMES, read_labelled, read_task


def write(directory: Path, files: Mapping[str, bytes]) -> Path:
    for name, content in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return directory


@pytest.mark.parametrize(
    ("name", "files", "class_names"),
    [
        ("MR", ("MR/rt-polarity.neg", "MR/rt-polarity.pos"), ("negative", "positive")),
        ("CR", ("CR/custrev.neg", "CR/custrev.pos"), ("negative", "positive")),
        ("SUBJ", ("SUBJ/subj.objective", "SUBJ/subj.subjective"), ("objective", "subjective")),
        ("MPQA", ("MPQA/mpqa.neg", "MPQA/mpqa.pos"), ("negative", "positive")),
    ],
)
def test_a_file_a_class(tmp_path: Path, name: str, files: tuple[str, str], class_names: tuple[str, str]) -> None:
    task = read_task(write(tmp_path, {files[0]: b"dull .\r\nslow .\n", files[1]: b"fine"}), name)
    assert task.class_names == class_names
    assert not task.has_split
    assert task.parts["all"].first == ["dull .", "slow .", "fine"]
    assert task.parts["all"].second is None
    assert task.parts["all"].labels.tolist() == [0, 0, 1]
    assert not task.problems


def test_latin_1_is_read_where_it_is_no_utf_8(tmp_path: Path) -> None:
    files = {"MR/rt-polarity.neg": "café .\n".encode("latin-1"), "MR/rt-polarity.pos": "naïve .\n".encode()}
    assert read_task(write(tmp_path, files), "MR").parts["all"].first == ["café .", "naïve ."]


def test_sst_has_three_parts(tmp_path: Path) -> None:
    files = {
        f"SST/binary/sentiment-{part}": f"{part} a\t0\n{part}\tb\t1\n".encode() for part in ("train", "dev", "test")
    }
    task = read_task(write(tmp_path, files), "SST2")
    assert task.has_split
    assert set(task.parts) == {"train", "dev", "test"}
    assert task.parts["dev"].first == ["dev a", "dev\tb"]
    assert task.parts["dev"].labels.tolist() == [0, 1]


def test_trec_takes_the_coarse_label(tmp_path: Path) -> None:
    kinds = ("ABBR", "DESC", "ENTY", "HUM", "LOC", "NUM")
    lines = "".join(f"{kind}:x What is {kind} ?\n" for kind in kinds).encode()
    task = read_task(write(tmp_path, {"TREC/train_5500.label": lines, "TREC/TREC_10.label": lines}), "TREC")
    assert task.parts["test"].first[3] == "What is HUM ?"
    assert task.parts["test"].labels.tolist() == list(range(6))


def test_mrpc_is_of_pairs_with_a_header_and_a_mark(tmp_path: Path) -> None:
    lines = (
        '\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n1\t7\t8\tOne .\tUno .\n0\t7\t8\tTwo .\t"Three .\n'.encode()
    )
    files = {f"MRPC/msr_paraphrase_{part}.txt": lines for part in ("train", "test")}
    part = read_task(write(tmp_path, files), "MRPC").parts["train"]
    assert part.first == ["One .", "Two ."]
    assert part.second == ["Uno .", '"Three .']
    assert part.labels.tolist() == [1, 0]


def test_lines_that_are_no_records_cost_themselves(tmp_path: Path) -> None:
    header = b"Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\n"
    lines = b"1\t7\t8\ta\tb\n0\t7\t8\ta\tb\n0\t7\t8\tonly one\n2\t7\t8\ta\tb\n1\t7\t8\t \tb\n\n"
    files = {f"MRPC/msr_paraphrase_{part}.txt": header + lines for part in ("train", "test")}
    task = read_task(write(tmp_path, files), "MRPC")
    assert len(task.parts["train"]) == 2
    assert task.problems == {"missing_field": 4, "unknown_label": 2, "empty_sentence": 2}
    assert task.examples[0].startswith("MRPC/msr_paraphrase_train.txt:4 (missing_field")


def test_an_empty_class_is_refused(tmp_path: Path) -> None:
    files = {"CR/custrev.neg": b"\n", "CR/custrev.pos": b"fine\n"}
    with pytest.raises(ValueError, match=r"CR, CR/custrev.neg and CR/custrev.pos: no sentence of the class negative"):
        read_task(write(tmp_path, files), "CR")


def test_unknown_tasks_and_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"task 'IMDB' is unknown: choose one of {', '.join(TASK_NAMES)}"):
        read_task(tmp_path, "IMDB")
    with pytest.raises(FileNotFoundError, match=r"rt-polarity\.neg"):
        read_task(tmp_path, "MR")


def test_ones_own_labels(tmp_path: Path) -> None:
    path = tmp_path / "mine.tsv"
    path.write_bytes("good\tfine .\nbad\tcafé\nbad\t \nbad\nodd\tx\ty\n".encode("latin-1"))
    task = read_labelled(path)
    assert (task.name, task.class_names, task.has_split) == ("mine", ("bad", "good"), False)
    assert task.parts["all"].first == ["fine .", "café"]
    assert task.parts["all"].labels.tolist() == [1, 0]
    assert task.problems == {"empty_sentence": 1, "missing_field": 2}
    assert task.examples[1] == "mine.tsv:4 (missing_field: 1 columns where the first line has 2)"


def test_ones_own_pairs_and_classes(tmp_path: Path) -> None:
    path = tmp_path / "pairs.tsv"
    path.write_text("same\ta\tb\nother\tc\td\nnone\te\tf\n")
    task = read_labelled(path, ("same", "other"))
    assert task.parts["all"].second == ["b", "d"]
    assert task.parts["all"].labels.tolist() == [0, 1]
    assert task.problems == {"unknown_label": 1}


@pytest.mark.parametrize(
    ("content", "class_names", "message"),
    [
        ("a\tx\na\ty\n", (), r"holds 1 class \(a\): a classifier needs two or more"),
        ("a\tx\nb\ty\n", ("a", "b", "c"), "no sentence of the class c"),
        ("", (), "the first line has 1 columns"),
        ("a\tb\tc\td\n", (), "the first line has 4 columns"),
    ],
)
def test_files_without_two_classes_are_refused(
    tmp_path: Path, content: str, class_names: tuple[str, ...], message: str
) -> None:
    (tmp_path / "data.tsv").write_text(content)
    with pytest.raises(ValueError, match=message):
        read_labelled(tmp_path / "data.tsv", class_names)
