"""Tests of pipelines.text.reading: what is intact is read exactly, and what is damaged costs one problem and no exception."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_archive_support import TEXTS, WRITERS, lines, parquet, read_file, tar, zst

from pipelines.archives import PLAIN_SUFFIXES, SUFFIXES, Archive, ArchiveFormat, list_archives
from pipelines.storage import resolve
from pipelines.text import reading as text
from pipelines.text.reading import Document, Problem, ProblemKind, read_documents


@settings(max_examples=40)
@given(st.lists(st.text(min_size=1).filter(str.strip), min_size=1, max_size=8))
def test_every_format_gives_back_the_same_texts_under_distinct_keys(texts: list[str]) -> None:
    with TemporaryDirectory() as directory:
        for name, write in WRITERS.items():
            Path(directory, name).write_bytes(write(texts))
        archives = list_archives(directory)
        assert [Path(a.path).name for a in archives] == sorted(WRITERS)
        keys = []
        for archive in archives:
            assert archive.num_bytes == Path(archive.path).stat().st_size
            documents = list(read_documents(directory, archive))
            assert [d.text for d in documents if isinstance(d, Document)] == texts == [d.text for d in documents]
            keys += [d.key for d in documents]
        assert len(set(keys)) == len(keys) == len(texts) * len(WRITERS)


def test_a_plain_text_file_is_one_document_and_is_listed_only_when_asked_for(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_bytes("one\n\ntwo \u2603\n".encode())
    (tmp_path / "b.txt").write_bytes("naïve".encode("latin-1"))
    (tmp_path / "c.rst").write_bytes(b" \n")
    with pytest.raises(FileNotFoundError):
        list_archives(str(tmp_path))
    archives = list_archives(str(tmp_path), PLAIN_SUFFIXES)
    document, *problems = (item for archive in archives for item in read_documents(str(tmp_path), archive))
    assert document == Document(key="a.md:0", text="one\n\ntwo \u2603\n")
    assert [(p.where, p.kind) for p in problems if isinstance(p, Problem)] == [
        ("b.txt:0", ProblemKind.INVALID_UTF8),
        ("c.rst:0", ProblemKind.EMPTY_DOCUMENT),
    ]


def test_keys_name_archive_member_and_record(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    path = tmp_path / "sub" / "a.tar"
    path.write_bytes(tar({"m/1.jsonl": b'not json\n\n"a"\n', "2.jsonl": b'"b"'}))
    (archive,) = list_archives(str(tmp_path))
    items = list(read_documents(str(tmp_path), archive))
    assert [i.key if isinstance(i, Document) else i.where for i in items] == [
        "sub/a.tar/m/1.jsonl:0",
        "sub/a.tar/m/1.jsonl:1",
        "sub/a.tar/2.jsonl:0",
    ]
    assert [d.key for d in read_file(path)[0]] == ["a.tar/m/1.jsonl:1", "a.tar/2.jsonl:0"]


@pytest.mark.parametrize("spell", [str, lambda p: p.as_uri(), lambda p: f"{p}/"])
def test_a_directory_may_be_spelled_as_path_or_uri(tmp_path: Path, spell: Callable[[Path], str]) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(TEXTS))
    (archive,) = list_archives(spell(tmp_path))
    assert [d.key for d in read_documents(spell(tmp_path), archive)] == [f"a.jsonl:{i}" for i in range(len(TEXTS))]


def test_a_relative_path_is_below_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert resolve("data/a.jsonl")[1] == str(tmp_path / "data" / "a.jsonl")


@pytest.mark.parametrize("uri", ["", "nonsense://host/a.jsonl"])
def test_a_uri_that_names_no_filesystem_is_refused(uri: str) -> None:
    with pytest.raises(ValueError, match="s3://"):
        resolve(uri)


# ---- listing ---------------------------------------------------------------------------------------------------------


def test_listing_passes_over_hidden_underscored_and_unknown_files(tmp_path: Path) -> None:
    for name in ["b.jsonl", "a/z.parquet", ".hidden.jsonl", "_part.jsonl", "_tmp/c.jsonl", ".git/d.jsonl", "x.zip"]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    archives = list_archives(str(tmp_path))
    assert [a.path for a in archives] == [f"{tmp_path}/a/z.parquet", f"{tmp_path}/b.jsonl"]
    assert [a.format for a in archives] == [ArchiveFormat.PARQUET, ArchiveFormat.JSONL]


def test_a_directory_without_archives_says_what_it_expected_and_saw(tmp_path: Path) -> None:
    (tmp_path / "corpus.zip").touch()
    with pytest.raises(FileNotFoundError, match=r"\.jsonl\.zst, \.tar, \.parquet; seen: corpus\.zip"):
        list_archives(str(tmp_path))


def test_a_file_with_an_unknown_suffix_is_refused(tmp_path: Path) -> None:
    (tmp_path / "corpus.zip").touch()
    with pytest.raises(ValueError, match=r"corpus\.zip.*\.jsonl\.zst"):
        list_archives(str(tmp_path / "corpus.zip"))


def test_a_missing_path_raises_at_listing_and_at_opening(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere\.jsonl"):
        list_archives(str(tmp_path / "nowhere.jsonl"))
    for suffix, archive_format in SUFFIXES.items():
        archive = Archive(path=str(tmp_path / f"gone{suffix}"), format=archive_format, num_bytes=1)
        with pytest.raises(FileNotFoundError):
            next(read_documents(str(tmp_path), archive))


# ---- one bad record --------------------------------------------------------------------------------------------------

BAD_RECORDS = {
    b'{"text": "caf\xe9"}': ProblemKind.INVALID_UTF8,
    b'{"text": "half a pair \\ud83d"}': ProblemKind.INVALID_UTF8,
    b"<html>": ProblemKind.INVALID_JSON,
    b'{"text": "cut': ProblemKind.INVALID_JSON,
    b"[" * 100_000: ProblemKind.INVALID_JSON,
    b"9" * 10_000: ProblemKind.INVALID_JSON,
    b'{"body": "a"}': ProblemKind.MISSING_TEXT,
    b'{"text": null}': ProblemKind.MISSING_TEXT,
    b'{"text": 3}': ProblemKind.MISSING_TEXT,
    b'{"text": ["a", 3]}': ProblemKind.MISSING_TEXT,
    b'["a"]': ProblemKind.MISSING_TEXT,
    b'{"text": ""}': ProblemKind.EMPTY_DOCUMENT,
    b'{"text": []}': ProblemKind.EMPTY_DOCUMENT,
    b'" \\n\\u00a0"': ProblemKind.EMPTY_DOCUMENT,
}


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.tar"])
def test_a_bad_record_costs_itself_only(name: str, tmp_path: Path) -> None:
    data = b"".join(b'"good"\n' + bad + b"\n" for bad in BAD_RECORDS) + b'"good"'
    encode = {"a.jsonl.gz": gzip.compress, "a.jsonl.zst": zst, "a.tar": lambda d: tar({"1.jsonl": d})}.get(name, bytes)
    (tmp_path / name).write_bytes(encode(data))
    documents, problems = read_file(tmp_path / name)
    where = name + "/1.jsonl" * (name == "a.tar")
    assert [d.key for d in documents] == [f"{where}:{i}" for i in range(0, 2 * len(BAD_RECORDS) + 1, 2)]
    assert [p.kind for p in problems] == list(BAD_RECORDS.values())
    assert [p.where for p in problems] == [f"{where}:{i}" for i in range(1, 2 * len(BAD_RECORDS), 2)]


def test_lists_are_joined_strings_are_text_and_the_field_can_be_chosen(read: Callable) -> None:
    assert read("a.jsonl", b'{"text": ["a", "b"]}\r\n"c"\r\n\r\n \n{"text": "d"}') == (["a\n\nb", "c", "d"], [])
    assert read("b.jsonl", b'{"text": "a", "body": "b"}', text_field="body") == (["b"], [])


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.zst", "a.parquet"])
def test_an_oversized_record_costs_itself_only(name: str, read: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "MAX_RECORD_BYTES", 100_000)
    texts = ["first", "x" * 1_000_000, "fits " * 10_000, "y" * 100_001, "last"]
    data = {"a.jsonl": lines(texts), "a.jsonl.zst": zst(lines(texts)), "a.parquet": parquet({"text": texts})}[name]
    found, problems = read(name, data)
    assert found == [texts[0], texts[2], texts[4]]
    assert [(p.kind, p.where) for p in problems] == [
        ("oversized_record", f"{name}:1"),
        ("oversized_record", f"{name}:3"),
    ]


# ---- Parquet ---------------------------------------------------------------------------------------------------------


def test_parquet_without_the_column_names_those_it_has(read: Callable) -> None:
    texts, problems = read("a.parquet", parquet({"id": [1], "body": ["a"]}))
    assert (texts, [p.kind for p in problems]) == ([], ["unreadable_archive"])
    assert "'text'" in problems[0].detail
    assert "'id', 'body'" in problems[0].detail
    assert read("a.parquet", parquet({"id": [1], "body": ["a"]}), text_field="body") == (["a"], [])


def test_parquet_without_a_footer_is_unreadable(read: Callable) -> None:
    texts, problems = read("a.parquet", parquet({"text": TEXTS})[:-1])
    assert (texts, [p.kind for p in problems]) == ([], ["unreadable_archive"])


def rows() -> Iterator[tuple[pa.Array, list[str], list[str]]]:
    yield pa.array(["a", None, " ", "b"]), ["a", "b"], ["missing_text", "empty_document"]
    yield pa.array([b"a", b"\xff", b"b"], pa.large_binary()), ["a", "b"], ["invalid_utf8"]
    yield pa.array([["a", "b"], [], None]), ["a\n\nb"], ["empty_document", "missing_text"]
    yield pa.array(["a", "b", "a"]).dictionary_encode(), ["a", "b", "a"], []
    yield pa.array([1, 2]), [], ["missing_text", "missing_text"]


@pytest.mark.parametrize(("column", "texts", "kinds"), list(rows()))
def test_a_parquet_row_is_judged_as_a_json_record_is(
    column: pa.Array, texts: list[str], kinds: list[str], read: Callable
) -> None:
    found, problems = read("a.parquet", parquet({"text": column}))
    assert (found, [p.kind for p in problems]) == (texts, kinds)
