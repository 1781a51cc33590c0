"""Labelled sentences: SentEval's files and one's own as they are, and their arrays."""

from __future__ import annotations

import tarfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from pipelines.sentences.senteval import (
    PROBING_FILES,
    SENTEVAL_NAMES,
    TASK_NAMES,
    Examples,
    LabelledSource,
    present_tasks,
    read_labelled,
    read_senteval,
    read_task,
)
from pipelines.text.tokenization import train_wordpiece


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
        ("SUBJ", ("SUBJ/subj.objective", "SUBJ/subj.subjective"), ("objective", "subjective")),
    ],
)
def test_a_file_a_class(tmp_path: Path, name: str, files: tuple[str, str], class_names: tuple[str, str]) -> None:
    latin_1, utf_8 = "dull .\r\ncafé .\n".encode("latin-1"), "naïve".encode()
    task = read_task(write(tmp_path, {files[0]: latin_1, files[1]: utf_8}), name)
    assert task.class_names == class_names
    assert not task.has_split
    assert task.parts["all"].first == ["dull .", "café .", "naïve"]
    assert task.parts["all"].second is None
    assert task.parts["all"].labels.tolist() == [0, 0, 1]
    assert not task.problems


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


def test_mrpc_is_of_pairs_with_a_header_and_a_mark_and_lines_that_are_no_records_cost_themselves(
    tmp_path: Path,
) -> None:
    header = "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n".encode()
    lines = b'1\t7\t8\tOne .\tUno .\n0\t7\t8\tTwo .\t"Three .\n0\t7\t8\tonly one\n2\t7\t8\ta\tb\n1\t7\t8\t \tb\n\n'
    files = {f"MRPC/msr_paraphrase_{part}.txt": header + lines for part in ("train", "test")}
    task = read_task(write(tmp_path, files), "MRPC")
    for part in task.parts.values():
        assert part.first == ["One .", "Two ."]
        assert part.second == ["Uno .", '"Three .']
        assert part.labels.tolist() == [1, 0]
    assert task.problems == {"missing_field": 4, "unknown_label": 2, "empty_sentence": 2}
    assert task.examples[0].startswith("MRPC/msr_paraphrase_train.txt:4 (missing_field")


def test_pairs_of_snli_lie_in_three_files_and_those_of_sick_in_one(tmp_path: Path) -> None:
    for part in ("train", "dev", "test"):
        labels, first, second = b"neutral\n-\nentailment\ncontradiction\n", b"a\nb\nc\nd\n", b"e\nf\ng\nh\n"
        write(tmp_path, {f"SNLI/labels.{part}": labels, f"SNLI/s1.{part}": first, f"SNLI/s2.{part}": second})
    rows = b"pair_ID\tsentence_A\tsentence_B\trelatedness_score\tentailment_judgment\n" + b"".join(
        b"%d\tone %d\ttwo %d\t%d.5\t%s\n" % (n, n, n, n, kind)
        for n, kind in enumerate((b"NEUTRAL", b"ENTAILMENT", b"CONTRADICTION"))
    )
    write(tmp_path, {f"SICK/SICK_{part}.txt": rows for part in ("train", "trial", "test_annotated")})
    snli, sick = read_task(tmp_path, "SNLI").parts["dev"], read_task(tmp_path, "SICKEntailment").parts["dev"]
    assert (snli.first, snli.second, snli.labels.tolist()) == (["a", "c", "d"], ["e", "g", "h"], [1, 0, 2])
    assert (sick.first[1], sick.second and sick.second[1], sick.labels.tolist()) == ("one 1", "two 1", [1, 2, 0])
    judged = read_senteval(tmp_path, "SICKRelatedness")
    assert (judged.first, judged.scores.tolist()) == (["one 0", "one 1", "one 2"], [0.5, 1.5, 2.5])
    write(tmp_path, {"SNLI/s2.dev": b"e\n"})
    with pytest.raises(
        ValueError, match=r"different numbers of lines: SNLI/labels\.dev 4, SNLI/s1\.dev 4, SNLI/s2\.dev 1"
    ):
        read_task(tmp_path, "SNLI")


def test_probing_tasks_have_their_parts_in_one_file_and_are_found_in_sentevals_data(tmp_path: Path) -> None:
    lines = "".join(f"{mark}\t{label}\tA {mark} {label} .\n" for mark in ("tr", "va", "te") for label in ("O", "I"))
    lines += "tr\tO\nxx\tO\tlost\nva\tU\tof no class\n"
    write(tmp_path, {f"probing/{file}.txt": lines.encode() for file in PROBING_FILES.values()})
    for name in ("MR/rt-polarity.neg", "MR/rt-polarity.pos"):
        write(tmp_path, {f"downstream/{name}": b"a film\n"})
    assert present_tasks(tmp_path, SENTEVAL_NAMES) == ("MR", *PROBING_FILES)
    assert present_tasks(tmp_path / "downstream", SENTEVAL_NAMES) == ("MR",)
    assert len(read_task(tmp_path, "MR").parts["all"]) == 2
    task = read_task(tmp_path, "CoordinationInversion")
    assert task.class_names == ("I", "O")
    assert {part: examples.first for part, examples in task.parts.items()} == {
        part: [f"A {mark} O .", f"A {mark} I ."] for part, mark in (("train", "tr"), ("dev", "va"), ("test", "te"))
    }
    assert task.parts["test"].labels.tolist() == [1, 0]
    assert task.problems == {"missing_field": 2, "unknown_label": 1}


def test_imdb_is_read_from_its_folder_and_from_its_archive_alike(tmp_path: Path) -> None:
    files = {
        f"aclImdb/{part}/{kind}/{n}_7.txt": f"{kind} {part} {n} <br /> caf\xe9 {n}\n".encode("latin-1")
        for part in ("train", "test")
        for kind in ("neg", "pos")
        for n in range(5)
    } | {"aclImdb/train/pos/9_7.txt": b" ", "aclImdb/train/unsup/0_0.txt": b"no class", "aclImdb/README": b"no review"}
    folder = write(tmp_path / "folder", files)
    whole = tmp_path / "archive" / "aclImdb_v1.tar.gz"
    whole.parent.mkdir()
    with tarfile.open(whole, "w:gz") as tar:
        tar.add(folder / "aclImdb", "aclImdb")
    task, packed = read_task(folder, "IMDb"), read_task(whole.parent, "IMDb")
    assert task.digest == packed.digest
    assert task.parts["all"].first[0] == "neg test 0 <br /> café 0"
    assert np.bincount(task.parts["all"].labels).tolist() == [10, 10]
    assert task.problems == packed.problems == {"empty_sentence": 1}
    assert present_tasks(folder, ("MR", "IMDb")) == present_tasks(whole.parent, ("MR", "IMDb")) == ("IMDb",)
    assert list(whole.parent.iterdir()) == [whole]
    # Of a download that was cut, the reviews that are missing of all 50 000 are lost.
    write(tmp_path / "cut", {whole.name: whole.read_bytes()[:-200]})
    cut = read_task(tmp_path / "cut", "IMDb")
    assert 0 < len(cut.parts["all"]) <= 20
    assert cut.problems["unread_review"] >= 50_000 - 21
    assert "aclImdb_v1.tar.gz (unread_review: the gzip stream ends early" in cut.examples[0]


def test_an_empty_class_an_unknown_task_and_a_missing_file_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"task 'IMDB' is unknown: choose one of {', '.join(TASK_NAMES)}"):
        read_task(tmp_path, "IMDB")
    with pytest.raises(
        ValueError, match=r"ImageCaptionRetrieval is not read: .* COCO/\*\.pkl only, and reading a pickle"
    ):
        read_task(tmp_path, "ImageCaptionRetrieval")
    with pytest.raises(FileNotFoundError, match=r"rt-polarity\.neg"):
        read_task(tmp_path, "MR")
    files = {"CR/custrev.neg": b"\n", "CR/custrev.pos": b"fine\n"}
    with pytest.raises(ValueError, match=r"CR, CR/custrev.neg and CR/custrev.pos: no sentence of the class negative"):
        read_task(write(tmp_path, files), "CR")


def test_ones_own_labels_and_pairs(tmp_path: Path) -> None:
    path = tmp_path / "mine.tsv"
    path.write_bytes("good\tfine .\nbad\tcafé\nbad\t \nbad\nodd\tx\ty\n".encode("latin-1"))
    task = read_labelled(path)
    assert (task.name, task.class_names, task.has_split) == ("mine", ("bad", "good"), False)
    assert task.parts["all"].first == ["fine .", "café"]
    assert task.parts["all"].labels.tolist() == [1, 0]
    assert task.problems == {"empty_sentence": 1, "missing_field": 2}
    assert task.examples[1] == "mine.tsv:4 (missing_field: 1 columns instead of 2)"
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


# ---- arrays ----------------------------------------------------------------------------------------------------------

FIRST = [f"{'very ' * (number % 5)}good film {number}" for number in range(13)]
SECOND = [f"film {number}" for number in range(13)]
LABELS = np.arange(13) % 3


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return train_wordpiece(FIRST, 120)


@pytest.mark.parametrize("second", [None, SECOND])
def test_rows_are_the_tokenizers_own(tokenizer: PreTrainedTokenizerFast, second: list[str] | None) -> None:
    if second:
        tokenizer.model_input_names = [*tokenizer.model_input_names, "token_type_ids"]
    source = LabelledSource.of(Examples(FIRST, second, LABELS), tokenizer, num_tokens=64)
    expected = tokenizer(FIRST, *([second] if second else []))
    for row, tokens in enumerate(expected["input_ids"]):
        batch = source.read(np.zeros(1, int), np.array([row]), 0)
        assert batch["input_ids"][0, : batch["lengths"][0]].tolist() == tokens
        assert set(batch["input_ids"][0, batch["lengths"][0] :]) <= {tokenizer.pad_token_id}
        assert batch["labels"][0] == LABELS[row]
        assert ("token_type_ids" in batch) == (second is not None)
        if second:
            assert batch["token_type_ids"][0, : len(tokens)].tolist() == expected["token_type_ids"][row]
            assert batch["token_type_ids"].sum() > 0
    assert source.num_cut == 0
    part = source[np.arange(4, 6)].read(np.zeros(1, int), np.array([1]), 0)
    assert part["input_ids"].tolist() == source.read(np.zeros(1, int), np.array([5]), 0)["input_ids"].tolist()


def test_long_sentences_are_cut_and_counted(tokenizer: PreTrainedTokenizerFast) -> None:
    source = LabelledSource.of(Examples(FIRST, None, LABELS), tokenizer, num_tokens=6)
    whole = [len(tokenizer.encode(text)) for text in FIRST]
    assert source.num_cut == sum(length > 6 for length in whole) > 0
    assert source.lengths.tolist() == [min(length, 6) for length in whole]
