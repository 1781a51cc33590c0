"""Tests of archives made to harm their reader: what each costs in records, in time, and in memory of its own process."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile
import time
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from pipelines.archives import list_archives
from pipelines.problems import Problem
from pipelines.tars import MAX_HEADER_BYTES, tar_members
from pipelines.text.reading import MAX_RECORD_BYTES, read_documents

MAX_MEMORY_BYTES = 10**9

# Not `ru_maxrss`, which begins with the peak of the process that started this one.
_READ_IN_CHILD = """
import json, re, sys
from pathlib import Path
from collections import Counter
from pipelines.archives import list_archives
from pipelines.problems import Problem
from pipelines.text.reading import read_documents

counts = []
for path in sys.argv[1:]:
    (archive,) = list_archives(path)
    items = read_documents(path, archive)
    counts.append(Counter(item.kind if isinstance(item, Problem) else "read" for item in items))
peak = re.search(r"VmHWM:\\s*(\\d+) kB", Path("/proc/self/status").read_text())
print(json.dumps([counts, int(peak[1]) * 1024]))
"""


def read_in_child(*paths: Path) -> tuple[list[dict[str, int]], int]:
    """Return what was read and lost of each archive, by kind, and the peak of the process's memory in bytes."""
    process = subprocess.run(
        [sys.executable, "-c", _READ_IN_CHILD, *paths], capture_output=True, text=True, timeout=120, check=False
    )
    assert process.returncode == 0, process.stderr
    return tuple(json.loads(process.stdout))


def member(name: str, data: bytes, kind: bytes = tarfile.REGTYPE) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.type = len(data), kind
    return info.tobuf(tarfile.GNU_FORMAT) + data + b"\0" * (-len(data) % 512)


LARGEST = MAX_RECORD_BYTES - 64
BOMBS = {
    "objects, compressed": (b'{"m":[', b"{},", b"0]}", 200 * 2**20, "oversized_record"),
    "lists in objects": (b'{"m":[', b'{"":[0]},', b"0]}", LARGEST, "missing_text"),
    "wide characters": ('{"text":"\U0001f600'.encode(), b"words ", b'"}', LARGEST, "read"),
}


def test_a_reader_of_lines_stays_below_a_gigabyte_and_goes_on(tmp_path: Path) -> None:
    for name, (opening, unit, closing, num_bytes, _) in BOMBS.items():
        line = opening + unit * (num_bytes // len(unit)) + closing
        data = zstandard.compress(b'"before"\n' + line + b'\n"after"\n')
        assert len(data) < 40_000
        (tmp_path / f"{name}.jsonl.zst").write_bytes(data)
    counts, memory = read_in_child(*(tmp_path / f"{name}.jsonl.zst" for name in BOMBS))
    assert counts == [Counter(["read", "read", kind]) for *_, kind in BOMBS.values()]
    assert memory < MAX_MEMORY_BYTES


def test_a_row_group_of_gigabytes_and_an_endless_line_of_a_plain_file_are_not_held(tmp_path: Path) -> None:
    schema = pa.schema({"text": pa.string()})
    with pq.ParquetWriter(tmp_path / "a.parquet", schema, compression="zstd", use_dictionary=False) as writer:
        for texts in (["first"], [chr(97 + number) * 2**26 for number in range(8)], ["last"]):
            writer.write_table(pa.table({"text": texts}))
    assert (tmp_path / "a.parquet").stat().st_size < 50_000
    with (tmp_path / "a.jsonl").open("wb") as file:
        file.seek(400 * 10**6)  # zeros, which take no room on the disk
        file.write(b'\n"after"\n')
    counts, memory = read_in_child(tmp_path / "a.parquet", tmp_path / "a.jsonl")
    assert counts == [{"read": 2, "oversized_record": 1}, {"oversized_record": 1, "read": 1}]
    assert memory < 400 * 10**6


def test_a_message_does_not_repeat_a_record(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({f"{number:0100}": "\ud83d" for number in range(10_000)}))
    (archive,) = list_archives(str(tmp_path))
    (problem,) = read_documents(str(tmp_path), archive)
    assert isinstance(problem, Problem)
    assert len(problem.detail.encode()) < 1000


# ---- headers of tars -------------------------------------------------------------------------------------------------


def test_a_hostile_header_costs_the_rest_of_the_tar_at_once(tmp_path: Path) -> None:
    headers = [
        (tarfile.XHDTYPE, b"1" * 2 * 10**6),
        (tarfile.XGLTYPE, b"1" * 2 * 10**6),
        (tarfile.XHDTYPE, b"1" * MAX_HEADER_BYTES),
        (tarfile.GNUTYPE_LONGNAME, b"n" * 2 * 10**6),
    ]
    first = member("1.jsonl", b'"one"')
    paths = [tmp_path / f"{number}.tar" for number in range(len(headers))]
    for path, (header_type, content) in zip(paths, headers, strict=True):
        path.write_bytes(first + member("h", content, header_type) + first + b"\0" * 1024)
    started = time.monotonic()
    counts, memory = read_in_child(*paths)
    assert counts == [{"read": 1, "truncated_archive": 1}] * len(headers)
    assert time.monotonic() - started < 30
    assert memory < 400 * 10**6


def test_many_small_headers_of_digits_take_linear_time(tmp_path: Path) -> None:
    digits = b"65536 comment=" + b"1" * (65536 - 15) + b"\n"
    data = member("h", digits, tarfile.XHDTYPE) * 300 + member("1.jsonl", b'"one"') + b"\0" * 1024
    started = time.monotonic()
    assert [info.name for info, _ in tar_members(io.BytesIO(data))] == ["1.jsonl"]
    assert time.monotonic() - started < 5


@pytest.mark.parametrize("size", ["-5", "1_000", "9" * 5000, "", "\u0663"])
def test_a_size_that_is_no_number_is_damage(size: str) -> None:
    record = f" size={size}\n".encode()
    length = next(n for n in range(3, 9999) if n == len(str(n)) + len(record))
    data = member("h", b"%d" % length + record, tarfile.XHDTYPE) + member("1.jsonl", b'"one"') + b"\0" * 1024
    with pytest.raises(tarfile.ReadError, match="is not a number"):
        list(tar_members(io.BytesIO(data)))
    info = tarfile.TarInfo("1.jsonl")
    info.size = -1
    with pytest.raises(tarfile.ReadError, match="a size of -1 bytes"):
        list(tar_members(io.BytesIO(info.tobuf(tarfile.GNU_FORMAT))))


@pytest.mark.parametrize("size", [2**62, 2**63, 2**80])
def test_a_member_of_a_size_that_no_file_has_is_damage(tmp_path: Path, size: int) -> None:
    info = tarfile.TarInfo("other")
    info.size = size
    path = tmp_path / "a.tar"
    path.write_bytes(member("1.jsonl", b'"one"') + info.tobuf(tarfile.GNU_FORMAT) + b"x" * 2000)
    with path.open("rb") as file, pytest.raises(tarfile.ReadError, match="ends within other"):
        list(tar_members(file))


NAMES = st.text(st.characters(min_codepoint=33, exclude_categories=["Cs", "Cc"]), min_size=1, max_size=300).filter(
    lambda name: not name.startswith("/") and not name.endswith("/")
)


@given(
    st.lists(st.tuples(NAMES, st.binary(max_size=1500)), min_size=1, max_size=6),
    st.sampled_from([tarfile.PAX_FORMAT, tarfile.GNU_FORMAT]),
    st.data(),
)
def test_members_are_those_that_tarfile_finds(
    contents: list[tuple[str, bytes]], form: int, data: st.DataObject
) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form, pax_headers={"comment": "all"}) as file:
        for name, content in contents:
            info = tarfile.TarInfo(name)
            info.size, info.mtime = len(content), 1.5
            file.addfile(info, io.BytesIO(content))
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, name
            file.addfile(link)
    with tarfile.open(fileobj=io.BytesIO(buffer.getvalue()), mode="r:") as file:
        expected = [
            (info.name, info.type, info.size, info.offset_data, info.isreg() and file.extractfile(info).read())
            for info in file
        ]
    found = []
    for info, content in tar_members(io.BytesIO(buffer.getvalue())):
        is_read = data.draw(st.booleans())
        read = b"".join(iter(lambda c=content: c.read(700), b"")) if is_read else None
        found.append((info.name, info.type, info.size, info.offset_data, read))
    assert len(found) == len(expected)
    for (*head, read), (*expected_head, expected_read) in zip(found, expected, strict=True):
        assert head == expected_head
        assert read in (None, expected_read or b"")


def test_a_link_and_sparse_files_in_place_of_text_are_losses(tmp_path: Path) -> None:
    sparse = member("h", b"26 GNU.sparse.realsize=10\n22 GNU.sparse.major=1\n", tarfile.XHDTYPE)
    data = member("1.jsonl", b"", tarfile.SYMTYPE) + sparse + member("2.jsonl", b'"no"') + member("3.jsonl", b'"yes"')
    data = member("0.jsonl", b'"no"', tarfile.GNUTYPE_SPARSE) + data
    (tmp_path / "a.tar").write_bytes(data + b"\0" * 1024)
    (archive,) = list_archives(str(tmp_path))
    items = list(read_documents(str(tmp_path), archive))
    found = [item.kind if isinstance(item, Problem) else item.text for item in items]
    assert found == ["irregular_member"] * 3 + ["yes"]
