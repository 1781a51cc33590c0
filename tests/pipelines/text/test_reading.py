"""Text archives: what is intact is read exactly, and what is damaged costs one problem and no exception."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from text_archive_support import TEXTS, WRITERS, lines, parquet, read_file, tar, zst

from pipelines.archives import PLAIN_SUFFIXES, SUFFIXES, Archive, ArchiveFormat, list_archives, list_source
from pipelines.problems import Problem, ProblemKind
from pipelines.text import reading as text
from pipelines.text.blocks import read_rows
from pipelines.text.manifest import Manifest
from pipelines.text.packing import DocumentConfig
from pipelines.text.prepare import PrepareConfig, prepare_text
from pipelines.text.reading import Document, read_documents
from pipelines.text.tokenization import train_bpe


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., tuple[list[str], list[Problem]]]:
    """Return a function that writes an archive, and returns the texts and the problems that are read from it."""

    def read(name: str, data: bytes, **options: str) -> tuple[list[str], list[Problem]]:
        (tmp_path / name).write_bytes(data)
        documents, problems = read_file(tmp_path / name, **options)
        return [document.text for document in documents], problems

    return read


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


@pytest.mark.parametrize("spell", [str, lambda path: path.as_uri(), lambda path: f"{path}/"])
def test_keys_name_archive_member_and_record_however_the_directory_is_spelled(
    tmp_path: Path, spell: Callable[[Path], str]
) -> None:
    (tmp_path / "sub").mkdir()
    path = tmp_path / "sub" / "a.tar"
    path.write_bytes(tar({"m/1.jsonl": b'not json\n\n"a"\n', "2.jsonl": b'"b"'}))
    (archive,) = list_archives(spell(tmp_path))
    items = list(read_documents(spell(tmp_path), archive))
    places = ["sub/a.tar/m/1.jsonl:0", "sub/a.tar/m/1.jsonl:1", "sub/a.tar/2.jsonl:0"]
    assert [i.key if isinstance(i, Document) else i.where for i in items] == places
    assert [d.key for d in read_file(path)[0]] == ["a.tar/m/1.jsonl:1", "a.tar/2.jsonl:0"]


def test_listing_passes_over_hidden_underscored_and_unknown_files(tmp_path: Path) -> None:
    for name in ["b.jsonl", "a/z.parquet", ".hidden.jsonl", "_part.jsonl", "_tmp/c.jsonl", ".git/d.jsonl", "x/x.zip"]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    archives = [(a.path, a.format) for a in list_archives(str(tmp_path))]
    wanted = [("a/z.parquet", ArchiveFormat.PARQUET), ("b.jsonl", ArchiveFormat.JSONL)]
    assert archives == [(f"{tmp_path}/{name}", kind) for name, kind in wanted]
    with pytest.raises(FileNotFoundError, match=r"\.jsonl\.zst, .*\.tar, .*\.parquet; seen: x\.zip"):
        list_archives(str(tmp_path / "x"))
    with pytest.raises(ValueError, match=r"x\.zip.*\.jsonl\.zst"):
        list_archives(str(tmp_path / "x" / "x.zip"))


def test_a_file_is_listed_once_and_what_is_not_read_is_named(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    for name in ("a.jsonl", "D.JSONL", "e.txt", "f\x1b[31m.zip"):
        (data / name).touch()
    for link, target in (("again", "."), ("once more", "."), ("b.jsonl", "a.jsonl"), ("linked", "../elsewhere")):
        (data / link).symlink_to(target)
    (data / "broken.jsonl").symlink_to("nowhere")
    (data / "endless.jsonl").symlink_to("endless.jsonl")
    os.mkfifo(data / "pipe.jsonl")
    Path(os.fsdecode(os.fsencode(data) + b"/caf\xe9.jsonl")).touch()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "c.tar").touch()
    listing = list_source(str(data))
    assert [archive.path.removeprefix(f"{data}/") for archive in listing.archives] == [
        "D.JSONL", "a.jsonl", "linked/c.tar",
    ]  # fmt: skip
    assert listing.not_read == [
        "broken.jsonl", "caf\\xe9.jsonl", "e.txt", "endless.jsonl", "f\\x1b[31m.zip", "pipe.jsonl",
    ]  # fmt: skip
    with pytest.raises(ValueError, match=r"caf\\udce9\.jsonl' is not UTF-8"):
        list_source(os.fsdecode(os.fsencode(data) + b"/caf\xe9.jsonl"))


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("{0000..0003}.jsonl", ["0000", "0001", "0002", "0003"]),
        ("000{1,3}.jsonl", ["0001", "0003"]),
        ("*.jsonl", ["0000", "0001", "0002", "0003"]),
        ("../d*/00*{0,2}.jsonl", ["0000", "0002"]),
    ],
)
def test_patterns_are_webdatasets_and_a_path_that_exists_is_none(
    tmp_path: Path, pattern: str, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir()
    for number in range(4):
        (tmp_path / "data" / f"{number:04d}.jsonl").write_bytes(b'"text"')
    (tmp_path / "data" / ".hidden.jsonl").touch()
    monkeypatch.chdir(tmp_path / "data")
    for source in (pattern, f"{tmp_path}/data/{pattern}", f"file://{tmp_path}/data/{pattern}?region=here"):
        archives = list_archives(source)
        assert [Path(archive.path).name for archive in archives] == [f"{name}.jsonl" for name in names]
        keys = [item.key for archive in archives for item in read_documents(source, archive)]
        assert [key.rpartition("/")[2] for key in keys] == [f"{name}.jsonl:0" for name in names]
    if pattern == "*.jsonl":
        (tmp_path / "data" / pattern).write_bytes(b'"another"')
        assert len(list_archives(pattern)) == 1
        for wrong in ("*.zip", "{0..9}.zip", "{0..9"):
            with pytest.raises((FileNotFoundError, ValueError), match=r"pattern|no such file"):
                list_archives(wrong)


@pytest.mark.parametrize("name", ["with space", "#1", "why?", "50%41", "{a,b}", "[0]*", "n" * 250, "\u2603"])
def test_every_name_that_the_file_system_allows_is_read_and_prepared_from(tmp_path: Path, name: str) -> None:
    data = tmp_path / name / name
    data.mkdir(parents=True)
    (data / "a.jsonl").write_bytes(lines(TEXTS))
    train_bpe(TEXTS, 270).save_pretrained(data / "tokenizer")
    config = PrepareConfig(source=str(data), tokenizer=str(data / "tokenizer"))
    layout = DocumentConfig(least_num_tokens=1, vocab_size=270)
    prepared = prepare_text(config, layout, f"{data}/prepared", losses=f"{data}/lost.jsonl")
    assert (prepared.num_documents, prepared.problems) == (len(TEXTS), {})
    assert Manifest.load(prepared.directory).digest == prepared.digest
    assert read_rows(prepared, prepared.shards[0], [0]).num_rows == 1


def test_a_missing_path_raises_at_listing_and_at_opening(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere\.jsonl"):
        list_archives(str(tmp_path / "nowhere.jsonl"))
    for suffix, archive_format in SUFFIXES.items():
        archive = Archive(path=str(tmp_path / f"gone{suffix}"), format=archive_format, num_bytes=1)
        with pytest.raises(FileNotFoundError):
            next(read_documents(str(tmp_path), archive))


# ---- one bad record --------------------------------------------------------------------------------------------------

XZ_OF_1_GIB_DICTIONARY = lzma.compress(b"0", filters=[{"id": lzma.FILTER_LZMA2, "dict_size": 2**30, "mf": lzma.MF_HC3}])

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
    b'{"text": ["a", null]}': ProblemKind.MISSING_TEXT,
    b'["a"]': ProblemKind.MISSING_TEXT,
    b'{"text": ""}': ProblemKind.EMPTY_DOCUMENT,
    b'{"text": []}': ProblemKind.EMPTY_DOCUMENT,
    b'" \\n\\u00a0"': ProblemKind.EMPTY_DOCUMENT,
}


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.zst", "a.tar"])
def test_a_bad_record_costs_itself_only(name: str, tmp_path: Path) -> None:
    data = b"".join(b'"good"\n' + bad + b"\n" for bad in BAD_RECORDS) + b'"good"'
    encode = {"a.jsonl.zst": zst, "a.tar": lambda d: tar({"1.jsonl": d})}.get(name, bytes)
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
    texts, problems = read("a.parquet", parquet({"text": TEXTS})[:-1])
    assert (texts, [p.kind for p in problems]) == ([], ["unreadable_archive"])


@pytest.mark.parametrize(
    ("column", "texts", "kinds"),
    [
        (pa.array(["a", None, " ", "b"]), ["a", "b"], ["missing_text", "empty_document"]),
        (pa.array([b"a", b"\xff", b"b"], pa.large_binary()), ["a", "b"], ["invalid_utf8"]),
        (pa.array([["a", "b"], [], None]), ["a\n\nb"], ["empty_document", "missing_text"]),
        (pa.array(["a", "b", "a"]).dictionary_encode(), ["a", "b", "a"], []),
        (pa.array([1, 2]), [], ["missing_text", "missing_text"]),
    ],
)
def test_a_parquet_row_is_judged_as_a_json_record_is(
    column: pa.Array, texts: list[str], kinds: list[str], read: Callable
) -> None:
    found, problems = read("a.parquet", parquet({"text": column}))
    assert (found, [p.kind for p in problems]) == (texts, kinds)


def test_rows_of_a_damaged_parquet_file_are_counted_once(tmp_path: Path) -> None:
    path, schema = tmp_path / "a.parquet", pa.schema({"text": pa.string()})
    with pq.ParquetWriter(path, schema, compression="zstd", use_dictionary=False) as writer:
        for texts in (["a" * 2**24] * 5, ["d"] * 3):  # the first takes too much memory
            writer.write_table(pa.table({"text": texts}, schema))
    at = pq.ParquetFile(path).metadata.row_group(1).column(0).data_page_offset
    data = path.read_bytes()
    path.write_bytes(data[:at] + b"\xff" * 8 + data[at + 8 :])
    (archive,) = list_archives(str(path))
    items = list(read_documents(str(path), archive))
    assert [item.count if isinstance(item, Problem) else item.text for item in items] == [5, 3]


# ---- damage ----------------------------------------------------------------------------------------------------------


def assert_prefix_and_one_problem(texts: list[str], problems: list[Problem]) -> None:
    assert texts == TEXTS[: len(texts)]
    assert [p.kind for p in problems] == [ProblemKind.TRUNCATED_ARCHIVE]


@pytest.mark.parametrize("name", ["a.jsonl.zst", "a.jsonl.gz", "a.jsonl.xz", "a.jsonl.bz2"])
def test_truncation_at_any_byte_gives_a_prefix_and_one_problem(name: str, read: Callable) -> None:
    compress = {"gz": gzip.compress, "xz": lzma.compress, "bz2": bz2.compress}
    suffix = name.rpartition(".")[2]
    data = zst(lines(TEXTS), flush_lines=True) if suffix == "zst" else compress[suffix](lines(TEXTS))
    num_documents = []
    for num_bytes in range(len(data)):
        texts, problems = read(name, data[:num_bytes])
        assert_prefix_and_one_problem(texts, problems)
        num_documents.append(len(texts))
    assert num_documents == sorted(num_documents)
    assert num_documents[-1] == len(TEXTS) or suffix == "bz2"  # a block is given as a whole
    if name.endswith("zst"):
        assert set(num_documents) == set(range(len(TEXTS) + 1)), "a document is given as soon as its block is there"
    assert read(name, data) == (TEXTS, [])


def test_truncation_of_a_tar_gives_a_prefix_and_one_problem(read: Callable) -> None:
    members = {f"{i}.jsonl": lines([t]) for i, t in enumerate(TEXTS[:3])}
    members |= {f"{i}.zst": zst(lines([t])) for i, t in enumerate(TEXTS[3:])}
    data = tar(members)
    end = 512 * sum(1 + -(-len(member) // 512) for member in members.values())
    for num_bytes in {*range(0, end, 97), *range(0, end, 512), end}:
        texts, problems = read("a.tar", data[:num_bytes])
        assert_prefix_and_one_problem(texts, problems)
        assert len(texts) >= num_bytes // 512 // 2 - 1, "documents before the damage are kept"
    assert read("a.tar", data) == (TEXTS, [])


def test_a_cut_line_of_a_plain_file_that_shrank_is_not_taken_for_a_record(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'"one"\n12')
    archive = Archive(path=str(path), format=ArchiveFormat.JSONL, num_bytes=100)
    items = list(read_documents(str(path), archive))
    assert [getattr(item, "kind", "read") for item in items] == ["read", "truncated_archive"]


def test_a_window_of_two_gibibytes_is_read_or_said_with_its_size(
    read: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameters = zstandard.ZstdCompressionParameters(window_log=31, compression_level=1)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    data = compressor.compress(lines(TEXTS)) + compressor.flush()
    if psutil.virtual_memory().available > 3 * 2**30:
        assert read("a.jsonl.zst", data) == (TEXTS, [])
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=2**31))
    for name, content, detail in (
        ("a.jsonl.zst", zst(b"") + data, "needs a window of 2,048 MiB"),
        ("b.jsonl.xz", XZ_OF_1_GIB_DICTIONARY, "Memory usage limit exceeded"),
    ):
        texts, (problem,) = read(name, content)
        assert not texts
        assert detail in problem.detail


def test_frames_after_a_skippable_one_are_read_and_the_last_may_not_be_cut(read: Callable) -> None:
    skippable = (0x184D2A53).to_bytes(4, "little") + (5).to_bytes(4, "little") + b"hello"
    frames = zst(lines(TEXTS), num_frames=4)
    assert read("a.jsonl.zst", skippable + frames + skippable) == (TEXTS, [])
    for cut in range(1, len(skippable)):
        texts, problems = read("a.jsonl.zst", frames + skippable[:cut])
        assert (texts, [p.kind for p in problems]) == (TEXTS, ["truncated_archive"])


@pytest.mark.parametrize("num_zeros", [4, 2**15, 2**17])
def test_streams_after_zeros_that_pad_an_xz_stream_are_read(num_zeros: int, read: Callable) -> None:
    data = b"".join(lzma.compress(lines(part)) + bytes(num_zeros) for part in (TEXTS[:2], TEXTS[2:]))
    assert read("a.jsonl.xz", data) == (TEXTS, [])


def test_a_damaged_member_does_not_stop_the_next(read: Callable) -> None:
    damaged = bytearray(zst(lines(TEXTS[2:4])))
    damaged[len(damaged) // 2] ^= 0xFF
    short = gzip.compress(lines(TEXTS[4:5]))[:-1]
    whole = {"0.zst": zst(lines(TEXTS[:2])), "3.jsonl": lines(TEXTS[5:])}
    members = sorted((whole | {"1.zst": bytes(damaged), "2.jsonl.gz": short}).items())
    texts, problems = read("a.tar", tar(members))
    assert [t for t in texts if t not in TEXTS[2:5]] == TEXTS[:2] + TEXTS[5:]
    assert [(p.kind, p.where) for p in problems] == [
        ("truncated_archive", f"a.tar/{name}") for name in ("1.zst", "2.jsonl.gz")
    ]


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
