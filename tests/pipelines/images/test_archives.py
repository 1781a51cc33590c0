"""Tars of images: samples are webdataset's, complete ones are read exactly, and damage costs its sample."""

from __future__ import annotations

import gzip
import io
import json
import lzma
import tarfile
from collections import Counter
from pathlib import Path

import pytest
import webdataset
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from image_archive_support import Members, jpeg, read
from PIL import Image
from text_archive_support import tar

from pipelines.images.archives import (
    ImageSample,
    KeyDot,
    LeftOut,
    list_image_archives,
    read_samples,
)
from pipelines.images.decoding import check_image
from pipelines.problems import Problem, ProblemKind

JPEG = jpeg()


def samples(num: int) -> list[tuple[str, bytes]]:
    members = []
    for number in range(num):
        caption = f"caption {number}"
        record = json.dumps({"caption": caption, "width": 20}).encode()
        for suffix, data in (("jpg", jpeg(number)), ("txt", f"{caption}\n".encode()), ("json", record)):
            members.append((f"{number:05d}.{suffix}", data))
    return members


def test_samples_are_webdatasets_and_their_bytes_lie_where_they_say(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    found, problems = read(path, tar([*samples(5), ("d/x.JPEG", jpeg(9)), ("d/x.cls", b"1"), ("d/x.txt", b"upper")]))
    assert not problems
    stored = path.read_bytes()
    expected = list(webdataset.WebDataset(str(path), shardshuffle=False))
    assert [sample.key for sample in found] == [sample["__key__"] for sample in expected]
    for sample, reference in zip(found, expected, strict=True):
        image = reference.get("jpg") or reference["jpeg"]
        assert stored[sample.offset : sample.offset + len(image)] == image == sample.data
        assert sample.captions == (reference["txt"].decode().strip(),)


@pytest.mark.parametrize(
    ("members", "captions"),
    [
        ({"txt": b"from txt", "json": b'{"caption": "from json"}'}, ("from txt",)),
        ({"json": b'{"caption": "from json"}'}, ("from json",)),
        ({"txt": b"from txt", "json": b'{"caption": ["one", " two "]}'}, ("one", "two")),
        ({"txt": "na\u00efve \u2603".encode()}, ("na\u00efve \u2603",)),
        ({"json": b'{"captions": ["a", " ", "b"]}'}, ("a", "b", "empty_caption")),  # A bad one of several costs itself.
        ({"json": b'{"captions": ["a", null, "b"]}'}, ("a", "b", "invalid_caption")),
        ({"txt": b"from txt", "json": b'{"captions": [null, 3]}'}, ("from txt",)),
        ({"txt": b"from txt", "json": b"{"}, ("from txt", ".json that cannot be read")),
        ({"txt": b"\xff", "json": b'{"caption": "from json"}'}, ("from json", ".txt that cannot be read")),
        ({"txt": b"one\ntwo\n"}, ("one\ntwo", "line breaks in a caption")),
        ({"txt": b"one\ntwo", "json": b'{"captions": ["one", "two"]}'}, ("one", "two")),
        # Lines are captions where the .json says so; img2dataset's .json has what its .txt has.
        ({"txt": b"one\n\n two\r\n", "json": b'{"caption": "two"}'}, ("one", "two")),
        ({"txt": b"one\ntwo", "json": b'{"caption": "one\\ntwo"}'}, ("one\ntwo", "line breaks in a caption")),
    ],
)
def test_captions_come_from_a_json_list_else_the_txt_else_the_json(
    tmp_path: Path, members: dict[str, bytes], captions: tuple[str, ...]
) -> None:
    """What is expected ends with the kinds of what is lost or left out."""
    path = tmp_path / "a.tar"
    path.write_bytes(tar([("1.jpg", jpeg()), *((f"1.{suffix}", data) for suffix, data in members.items())]))
    items = list(read_samples(str(path), list_image_archives(str(path))[0]))
    (sample,) = (item for item in items if isinstance(item, ImageSample))
    kinds = [item.kind.split(" (")[0] for item in items if not isinstance(item, ImageSample)]
    assert (*sample.captions, *kinds) == captions


BAD_SAMPLES: dict[str, tuple[dict[str, bytes], ProblemKind]] = {
    "no caption": ({"jpg": b"x"}, ProblemKind.MISSING_CAPTION),
    "null caption": ({"jpg": b"x", "json": b'{"caption": null}'}, ProblemKind.MISSING_CAPTION),
    "number as caption": ({"jpg": b"x", "json": b'{"caption": [1]}'}, ProblemKind.MISSING_CAPTION),
    "no json": ({"jpg": b"x", "json": b"[" * 100_000}, ProblemKind.INVALID_JSON),
    "empty caption": ({"jpg": b"x", "txt": b" \n"}, ProblemKind.EMPTY_CAPTION),
    "0-byte caption": ({"jpg": b"x", "txt": b""}, ProblemKind.EMPTY_CAPTION),
    "latin-1": ({"jpg": b"x", "txt": b"caf\xe9"}, ProblemKind.INVALID_UTF8),
    "half a surrogate pair": ({"jpg": b"x", "json": b'{"caption": "\\ud83d"}'}, ProblemKind.INVALID_UTF8),
    "no image": ({"txt": b"alone"}, ProblemKind.MISSING_IMAGE),
    "endless caption": ({"jpg": b"x", "txt": b"a" * (2**22 + 1)}, ProblemKind.OVERSIZED_MEMBER),
}


@pytest.mark.parametrize("name", BAD_SAMPLES)
def test_a_bad_sample_costs_itself(tmp_path: Path, name: str) -> None:
    parts, kind = BAD_SAMPLES[name]
    bad = [(f"00000x.{suffix}", data) for suffix, data in parts.items()]
    found, problems = read(tmp_path / "a.tar", tar([*samples(1), *bad, *samples(3)[3:]]))
    assert [sample.key for sample in found] == ["00000", "00001", "00002"]
    assert [problem.kind for problem in problems] == [kind]
    assert "a.tar/00000x" in problems[0].where


def test_a_tar_cut_anywhere_keeps_every_complete_sample_and_has_one_problem(tmp_path: Path) -> None:
    members = samples(4)
    whole = tar(members)
    ends = {}  # where the data of image and caption are complete
    with tarfile.open(fileobj=io.BytesIO(whole)) as file:
        for info in file:
            if info.name.endswith(".txt"):
                ends[info.name[:5]] = info.offset_data + info.size
    for cut in range(512, max(ends.values()) + 600, 97):
        found, problems = read(tmp_path / "a.tar", whole[:cut])
        assert [sample.key for sample in found] == [key for key, end in ends.items() if end <= cut]
        assert [problem.kind for problem in problems] == [ProblemKind.TRUNCATED_ARCHIVE]
        assert problems[0].where == "a.tar"


@pytest.mark.parametrize("data", [b"", b"\xff" * 10_000, b"\0" * 10_240, tar([("a.mp", b"x"), ("b.cls", b"1")])])
def test_what_is_no_tar_of_samples_is_one_problem(tmp_path: Path, data: bytes) -> None:
    found, problems = read(tmp_path / "a.tar", data)
    assert not found
    assert len(problems) == 1


def test_links_and_sparse_files_are_problems_and_hostile_names_are_only_names(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as file:
        for name, kind in [("s.jpg", tarfile.SYMTYPE), ("h.jpg", tarfile.LNKTYPE), ("d.jpg", tarfile.CHRTYPE)]:
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "/etc/passwd"
            file.addfile(info)
            caption = tarfile.TarInfo(name.replace("jpg", "txt"))
            caption.size = 1
            file.addfile(caption, io.BytesIO(b"c"))
        for name in ["../../up.jpg", "../../up.txt", "/etc/root.jpg", "/etc/root.txt", "b\udcff.jpg", "b\udcff.txt"]:
            info = tarfile.TarInfo(name)
            data = jpeg() if name.endswith("jpg") else b"caption"
            info.size = len(data)
            file.addfile(info, io.BytesIO(data))
    fields = b"26 GNU.sparse.realsize=10\n22 GNU.sparse.major=1\n"
    header = tarfile.TarInfo("h")
    header.size, header.type = len(fields), tarfile.XHDTYPE
    sparse = header.tobuf(tarfile.GNU_FORMAT) + fields.ljust(512, b"\0") + tar({"sparse.jpg": b"\1"})[:1024]
    found, problems = read(tmp_path / "a.tar", sparse + buffer.getvalue())
    assert [problem.kind for problem in problems] == [ProblemKind.IRREGULAR_MEMBER] * 4
    assert [sample.key for sample in found] == ["../../up", "/etc/root", "b\\xff"]
    assert [path.name for path in tmp_path.iterdir()] == ["a.tar"]


def read_all(
    path: Path, members: Members, key_dot: KeyDot = "first"
) -> tuple[Counter[str], list[Problem], Counter[str]]:
    """Return the keys of samples, the problems, and the kinds of what is left out."""
    path.write_bytes(tar(members))
    (archive,) = list_image_archives(str(path))
    items = list(read_samples(str(path), archive, key_dot=key_dot))
    found = Counter(item.key for item in items if isinstance(item, ImageSample))
    problems = [item for item in items if isinstance(item, Problem)]
    return found, problems, Counter(item.kind for item in items if isinstance(item, LeftOut))


def pair(key: str) -> list[tuple[str, bytes]]:
    return [(f"{key}.jpg", jpeg()), (f"{key}.txt", key.encode())]


DOTTED = [*pair("photo.v1.2"), *pair("photo.v1.3"), *pair("dir.x/photo"), *pair("last")]


@pytest.mark.parametrize(
    ("key_dot", "keys", "left_out"),
    [
        ("first", ["dir.x/photo", "last"], {f".v1.{n}.{suffix}": 1 for n in (2, 3) for suffix in ("jpg", "txt")}),
        ("last", ["photo.v1.2", "photo.v1.3", "dir.x/photo", "last"], {}),
    ],
)
def test_a_key_ends_at_the_first_dot_as_webdatasets_or_at_the_last(
    tmp_path: Path, key_dot: KeyDot, keys: list[str], left_out: dict[str, int]
) -> None:
    assert read_all(tmp_path / "a.tar", DOTTED, key_dot) == (Counter(keys), [], left_out)
    if key_dot == "first":
        theirs = webdataset.WebDataset(str(tmp_path / "a.tar"), shardshuffle=False)
        assert [sample["__key__"] for sample in theirs if "jpg" in sample] == keys
        (problem,) = read_all(tmp_path / "b.tar", DOTTED[:4])[1]
        assert problem.kind == "empty_archive"
        assert "1 .v1.2.jpg" in problem.detail
        assert "key_dot = last" in problem.detail


def test_members_of_other_kinds_are_counted_wherever_they_lie(tmp_path: Path) -> None:
    other = [("0.cls", b"1"), ("0.npy", b"1"), ("README", b"x"), (".hidden.jpg", b"x"), ("._0.jpg", b"x")]
    beside = ["a.depth.png", "a.jpg", "a.meta.json", "a.png", "a.txt"]
    mixed = [(name, b"a" if name.endswith("txt") else b"{}" if name.endswith("json") else JPEG) for name in beside]
    found, problems, left_out = read_all(tmp_path / "a.tar", [*pair("0"), *other, *mixed])
    assert found == Counter(["0", "a"])
    assert not problems
    kinds = [".cls", ".npy", ".depth.png", ".meta.json", "further images of a sample"]
    assert left_out == {"no suffix": 3} | dict.fromkeys(kinds, 1)


def test_images_and_captions_apart_are_one_reason_and_what_has_no_partner_says_what_there_is(tmp_path: Path) -> None:
    images, texts = zip(*(pair(f"{number:03d}") for number in range(40)), strict=True)
    found, problems, _ = read_all(tmp_path / "a.tar", [*images, ("alone.txt", b"x"), *texts, ("x.jpg", JPEG)])
    assert not found
    assert [(problem.kind.value, problem.count) for problem in problems] == [
        ("missing_image", 1), ("missing_caption", 1), ("image_and_caption_apart", 40),
    ]  # fmt: skip
    reasons = ["there is alone.txt, and no image", "there is x.jpg, and no .txt or .json", "tar --sort=name"]
    assert all(reason in problem.detail for reason, problem in zip(reasons, problems, strict=True))


def test_a_member_that_is_there_twice_costs_itself_and_a_compressed_tar_is_named(tmp_path: Path) -> None:
    found, problems, _ = read_all(tmp_path / "a.tar", [*pair("a"), *pair("a"), *pair("b")])
    assert found == Counter(["a", "b"])
    assert [problem.kind for problem in problems] == ["duplicated_key"] * 2
    for name, compress in (("gz", gzip.compress), ("xz", lzma.compress), ("zst", zstandard.compress)):
        found, (problem,) = read(tmp_path / "a.tar", compress(tar(pair("a"))))
        assert not found
        assert name in problem.detail


MEMBERS = st.lists(
    st.builds(
        lambda key, suffix: (
            f"{key}.{suffix}",
            {"txt": b"text", "json": b'{"caption": ["one", "two"]}'}.get(suffix, JPEG),
        ),
        st.sampled_from(["a", "a.b", "a.b.c", "b", "b.x", "d/a", "d/a.b"]),
        st.sampled_from(["jpg", "txt", "json", "cls", "PNG"]),
    ),
    min_size=1,
    max_size=14,
)


@given(MEMBERS, st.sampled_from(["first", "last"]))
def test_nothing_is_lost_in_silence_in_any_order(
    tmp_path_factory: pytest.TempPathFactory, members: list[tuple[str, bytes]], key_dot: KeyDot
) -> None:
    members = [member for member in members if not member[0].endswith("json")]  # those that a sample need not have
    found, problems, left_out = read_all(tmp_path_factory.mktemp("any") / "a.tar", members, key_dot)
    num_lost = sum(problem.count * (2 if problem.kind == "image_and_caption_apart" else 1) for problem in problems)
    is_empty = any(problem.kind == "empty_archive" for problem in problems)
    assert 2 * found.total() + num_lost - is_empty + left_out.total() == len(members)


def test_members_of_every_image_format_are_read(tmp_path: Path) -> None:
    members: Members = ()
    for suffix in ("gif", "bmp", "webp", "png", "tif", "tiff", "TIF"):
        buffer = io.BytesIO()
        Image.new("RGB", (4, 4)).save(buffer, "TIFF" if "tif" in suffix.lower() else suffix)
        check_image(buffer.getvalue())
        members = (*members, (f"{suffix}.{suffix}", buffer.getvalue()), (f"{suffix}.txt", b"red"))
    found, problems, left_out = read_all(tmp_path / "a.tar", members)
    assert (found.total(), problems, left_out.total()) == (7, [], 0)
