"""Test that damaged text costs one problem and no exception, and that what comes before and after it is read."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from text_archive_support import TEXTS, WRITERS, lines, parquet, read_file, tar, zst

from pipelines.archives import Archive, ArchiveFormat
from pipelines.text.reading import Document, Problem, ProblemKind, read_documents


def assert_prefix_and_one_problem(texts: list[str], problems: list[Problem]) -> None:
    assert texts == TEXTS[: len(texts)]
    assert [p.kind for p in problems] == [ProblemKind.TRUNCATED_ARCHIVE]


@pytest.mark.parametrize("name", ["a.jsonl.zst", "a.jsonl.gz"])
def test_truncation_at_any_byte_gives_a_prefix_and_one_problem(name: str, read: Callable) -> None:
    data = zst(lines(TEXTS), flush_lines=True) if name.endswith("zst") else gzip.compress(lines(TEXTS))
    num_documents = []
    for num_bytes in range(len(data)):
        texts, problems = read(name, data[:num_bytes])
        assert_prefix_and_one_problem(texts, problems)
        num_documents.append(len(texts))
    assert num_documents == sorted(num_documents)
    assert num_documents[-1] == len(TEXTS)
    if name.endswith("zst"):
        assert set(num_documents) == set(range(len(TEXTS) + 1)), "a document is given as soon as its block is there"
    assert read(name, data) == (TEXTS, [])


def test_truncation_of_a_tar_gives_a_prefix_and_one_problem(read: Callable) -> None:
    members = {f"{i}.jsonl": lines([t]) for i, t in enumerate(TEXTS[:3])}
    members |= {f"{i}.zst": zst(lines([t])) for i, t in enumerate(TEXTS[3:])}
    data = tar(members)
    end = 512 * sum(1 + -(-len(member) // 512) for member in members.values())
    for num_bytes in {*range(0, end, 37), *range(0, end, 512), end}:
        texts, problems = read("a.tar", data[:num_bytes])
        assert_prefix_and_one_problem(texts, problems)
        assert len(texts) >= num_bytes // 512 // 2 - 1, "documents before the damage are kept"
    assert read("a.tar", data) == (TEXTS, [])


def test_a_cut_line_of_a_plain_file_that_shrank_is_not_taken_for_a_record(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'"one"\n12')
    archive = Archive(path=str(path), format=ArchiveFormat.JSONL, num_bytes=100)
    items = list(read_documents(str(path), archive))
    assert [type(i) for i in items] == [Document, Problem]
    assert items[1].kind == ProblemKind.TRUNCATED_ARCHIVE


def test_frames_after_a_skippable_one_are_read_and_the_last_may_not_be_cut(read: Callable) -> None:
    skippable = (0x184D2A53).to_bytes(4, "little") + (5).to_bytes(4, "little") + b"hello"
    frames = zst(lines(TEXTS), num_frames=4)
    assert read("a.jsonl.zst", skippable + frames + skippable) == (TEXTS, [])
    for cut in range(1, len(skippable)):
        texts, problems = read("a.jsonl.zst", frames + skippable[:cut])
        assert (texts, [p.kind for p in problems]) == (TEXTS, ["truncated_archive"])


@pytest.mark.parametrize("options", [{}, {"write_content_size": False}, {"write_checksum": True}, {"level": 19}])
@pytest.mark.parametrize("num_records", [1, 40, 400, 20_000])
def test_the_end_of_a_frame_is_recognised_whatever_its_header(options: dict, num_records: int, read: Callable) -> None:
    data = b'"the same words again"\n' * num_records
    frame = zstandard.ZstdCompressor(**options).compress(data)
    texts, problems = read("a.jsonl.zst", frame + frame)
    assert (len(texts), problems) == (2 * num_records, [])


@settings(max_examples=150)
@given(st.data())
def test_overwritten_bytes_never_raise(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(WRITERS)))
    content = bytearray(WRITERS[name](TEXTS))
    start = data.draw(st.integers(0, len(content) - 1))
    noise = data.draw(st.binary(min_size=1, max_size=8))
    content[start : start + len(noise)] = noise
    with TemporaryDirectory() as directory:
        Path(directory, name).write_bytes(content)
        read_file(Path(directory, name))


def test_a_damaged_member_does_not_stop_the_next(read: Callable) -> None:
    damaged = bytearray(zst(lines(TEXTS[2:4])))
    damaged[len(damaged) // 2] ^= 0xFF
    short = gzip.compress(lines(TEXTS[4:5]))[:-1]
    members = {
        "0.zst": zst(lines(TEXTS[:2])),
        "1.zst": bytes(damaged),
        "2.jsonl.gz": short,
        "3.jsonl": lines(TEXTS[5:]),
    }
    texts, problems = read("a.tar", tar(members))
    assert [t for t in texts if t not in TEXTS[2:5]] == TEXTS[:2] + TEXTS[5:]
    assert [(p.kind, p.where) for p in problems] == [
        ("truncated_archive", "a.tar/1.zst"),
        ("truncated_archive", "a.tar/2.jsonl.gz"),
    ]


def test_a_broken_header_inside_a_tar_is_not_taken_for_its_end(read: Callable) -> None:
    data = bytearray(tar({"1.jsonl": b'"a"', "2.jsonl": b'"b"'}))
    data[1024:1034] = b"\xff" * 10
    texts, problems = read("a.tar", bytes(data))
    assert (texts, [p.kind for p in problems]) == (["a"], ["truncated_archive"])


# ---- archives without records ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.jsonl", b""),
        ("a.jsonl", b"\n \r\n"),
        ("a.jsonl.gz", gzip.compress(b"", mtime=0)),
        ("a.jsonl.zst", zst(b"")),
        ("a.tar", tar({})),
        ("a.tar", tar({"1.jsonl": b"", "2.zst": zst(b"")})),
        ("a.tar", tar({"readme.md": b"?"})),
        ("a.parquet", parquet({"text": pa.array([], pa.string())})),
    ],
)
def test_an_archive_without_records_is_reported_once(name: str, data: bytes, read: Callable) -> None:
    texts, problems = read(name, data)
    assert (texts, [(p.kind, p.where) for p in problems]) == ([], [("empty_archive", name)])
    assert "readme" not in str(data) or "readme.md" in problems[0].detail
