"""Test the division of archives: the parts of an archive hold what the whole holds, wherever it is divided."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from text_archive_support import tar

from pipelines.archives import list_archives
from pipelines.lines import MAX_RECORD_BYTES, decode, lines_of, split_lines
from pipelines.problems import Problem, ProblemKind
from pipelines.text.reading import Document, Part, list_parts, read_documents


def read(path: Path, part_bytes: int) -> list[list[Document | Problem]]:
    """Return what each part of an archive holds."""
    (archive,) = list_archives(str(path))
    (parts,) = list_parts(str(path), [archive], part_bytes=part_bytes)
    return [list(read_documents(str(path), archive, part=part)) for part in parts]


@given(
    data=st.lists(st.sampled_from([b"a", b"bc", b"\n", b"\n\n", b"defghij", b"\r\n", b"\xe2\x80\xa8"]), max_size=30),
    mark=st.sampled_from([b"", b"\xef\xbb\xbf"]),
    size=st.integers(1, 20),
)
def test_every_line_belongs_to_the_range_in_which_it_begins(data: list[bytes], mark: bytes, size: int) -> None:
    """A byte order mark belongs to no line, and U+2028 ends none."""
    data = mark + b"".join(data)
    starts, begins = list(range(0, len(data), size)), [0] + [at + 1 for at, byte in enumerate(data) if byte == 10]
    for start in starts:
        stop = min(start + size, len(data))
        lines = list(split_lines(io.BytesIO(data), start, stop))
        expected = [data[at:].split(b"\n")[0].removeprefix(mark).strip() for at in begins if start <= at < stop]
        assert lines == [line for line in expected if line]


def test_lines_of_a_text_end_at_line_feeds_only() -> None:
    assert lines_of(decode("\ufeffone\u2028still one\r\ntwo\x0c\x85\n".encode())) == [
        "one\u2028still one",
        "two\x0c\x85",
        "",
    ]


def test_a_line_without_an_end_is_lost_once_and_ends_the_reading_soon() -> None:
    data = b"first\n" + b"x" * (MAX_RECORD_BYTES + 2**20) + b"\nlast\n"
    size = 2**20
    lines = [
        line
        for start in range(0, len(data), size)
        for line in split_lines(io.BytesIO(data), start, min(start + size, len(data)))
    ]
    assert lines == [b"first", None, b"last"]


def records(first: int, count: int) -> bytes:
    return b"".join(json.dumps({"text": f"document {first + number} " * 9}).encode() + b"\n" for number in range(count))


def make_jsonl(path: Path) -> None:
    path.write_bytes(records(0, 150) + b"this is no JSON\n" + records(150, 50))


def make_tar(path: Path) -> None:
    """Write a tar whose members have short, long (pax) and foreign names, in several formats; one member is broken."""
    members = []
    for number in range(20):
        name, data = (
            f"{'long/' * 30 * (number % 3 == 0)}{number}.jsonl.zst",
            zstandard.compress(records(10 * number, 10)),
        )
        data = data[: len(data) // 2] if number == 7 else data
        members.append((f"{number}.png", b"no text" * 400) if number % 5 == 4 else (name, data))
    path.write_bytes(tar(members, format=tarfile.PAX_FORMAT))


def make_parquet(path: Path) -> None:
    texts = [f"document {number} " * 9 for number in range(100)] + [None] * 3
    pq.write_table(pa.table({"text": texts, "other": list(range(103))}), path, row_group_size=7)


def make_cut_tar(path: Path) -> None:
    make_tar(path)
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * 0.8)])


MAKERS = {"a.jsonl": make_jsonl, "a.tar": make_tar, "cut.tar": make_cut_tar, "a.parquet": make_parquet}


@pytest.mark.parametrize("part_bytes", [1, 700, 10**6])
@pytest.mark.parametrize("name", MAKERS)
def test_the_parts_hold_what_the_whole_holds(tmp_path: Path, name: str, part_bytes: int) -> None:
    path = tmp_path / name
    MAKERS[name](path)
    parts = read(path, part_bytes)
    (whole,) = read(path, 10**9)
    items = [item for part in parts for item in part]
    keys = [item.key if isinstance(item, Document) else item.where for item in items]
    assert len(set(keys)) == len(keys)
    if name == "a.jsonl":  # Its records are counted from the beginning of the part.
        assert [getattr(item, "text", "lost") for item in items] == [getattr(item, "text", "lost") for item in whole]
    else:
        assert items == whole
    assert (len(parts) == 1) == (part_bytes == 10**6)
    if name == "cut.tar":
        assert parts[-1][-1].kind == ProblemKind.TRUNCATED_ARCHIVE


def test_a_name_that_occurs_twice_or_a_global_header_keeps_a_tar_whole(tmp_path: Path) -> None:
    for number, (names, headers) in enumerate([(["a", "b", "a"], {}), (["a", "b", "c"], {"path": "other.jsonl"})]):
        path = tmp_path / f"{number}.tar"
        members = [(f"{name}.jsonl", records(0, 5)) for name in names]
        path.write_bytes(tar(members, format=tarfile.PAX_FORMAT, pax_headers=headers))
        assert list_parts(str(path), list_archives(str(path)), part_bytes=100) == [[Part()]]
        (items,) = read(path, 100)
        assert len({item.key for item in items if isinstance(item, Document)}) == 15


def test_dividing_a_tar_reads_little_more_than_its_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(tar({f"{number}.jsonl": bytes(2**20) for number in range(8)}))
    read_sizes: list[int] = []

    class CountedFile(io.FileIO):
        def readinto(self, buffer: Any, /) -> int:
            read_sizes.append(super().readinto(buffer))
            return read_sizes[-1]

    class Counting:
        open_input_file = CountedFile

    monkeypatch.setattr("pipelines.text.reading.resolve_source", lambda uri: (Counting(), uri))
    (parts,) = list_parts(str(path), list_archives(str(path)), part_bytes=2 * 2**20)
    assert len(parts) == 4
    assert 0 < sum(read_sizes) < 10 * 2**14
