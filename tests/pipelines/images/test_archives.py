"""Tests of pipelines.images.archives: complete samples are read exactly, damage costs its sample and no exception."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import pytest
import webdataset
from hypothesis import given, settings
from hypothesis import strategies as st
from image_archive_support import Members, jpeg, read, tar
from PIL import Image

from pipelines.images.archives import list_image_archives, read_samples
from pipelines.images.decoding import check_image
from pipelines.images.samples import ImageSample, LeftOut, SampleProblemKind
from pipelines.problems import Problem

Names = list[tuple[str, str]]

SUFFIXES = ["jpg", "txt", "cls"]


def samples(num: int) -> list[tuple[str, bytes]]:
    return [
        member
        for number in range(num)
        for member in [
            (f"{number:05d}.jpg", jpeg(number)),
            (f"{number:05d}.txt", f"caption {number}\n".encode()),
            (f"{number:05d}.json", json.dumps({"caption": f"caption {number}", "width": 20}).encode()),
        ]
    ]


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
        ({"txt": b"from txt", "json": b"{"}, ("from txt",)),
        ({"txt": b"from txt", "json": b'{"caption": ["one", " two "]}'}, ("one", "two")),
        ({"txt": "na\u00efve \u2603".encode()}, ("na\u00efve \u2603",)),
    ],
)
def test_captions_come_from_a_json_list_else_the_txt_else_the_json(
    tmp_path: Path, members: dict[str, bytes], captions: tuple[str, ...]
) -> None:
    (sample,), problems = read(
        tmp_path / "a.tar", tar([("1.jpg", jpeg()), *((f"1.{s}", d) for s, d in members.items())])
    )
    assert sample.captions == captions
    assert not problems


BAD_SAMPLES: dict[str, tuple[dict[str, bytes], SampleProblemKind]] = {
    "no caption": ({"jpg": b"x"}, SampleProblemKind.MISSING_CAPTION),
    "null caption": ({"jpg": b"x", "json": b'{"caption": null}'}, SampleProblemKind.MISSING_CAPTION),
    "number as caption": ({"jpg": b"x", "json": b'{"caption": [1]}'}, SampleProblemKind.MISSING_CAPTION),
    "no json": ({"jpg": b"x", "json": b"[" * 100_000}, SampleProblemKind.MISSING_CAPTION),
    "empty caption": ({"jpg": b"x", "txt": b" \n"}, SampleProblemKind.EMPTY_CAPTION),
    "0-byte caption": ({"jpg": b"x", "txt": b""}, SampleProblemKind.EMPTY_CAPTION),
    "latin-1": ({"jpg": b"x", "txt": b"caf\xe9"}, SampleProblemKind.INVALID_UTF8),
    "half a surrogate pair": ({"jpg": b"x", "json": b'{"caption": "\\ud83d"}'}, SampleProblemKind.INVALID_UTF8),
    "no image": ({"txt": b"alone"}, SampleProblemKind.MISSING_IMAGE),
    "endless caption": ({"jpg": b"x", "txt": b"a" * (2**22 + 1)}, SampleProblemKind.OVERSIZED_MEMBER),
}


@pytest.mark.parametrize("name", BAD_SAMPLES)
def test_a_bad_sample_costs_itself(tmp_path: Path, name: str) -> None:
    parts, kind = BAD_SAMPLES[name]
    bad = [(f"00000x.{suffix}", data) for suffix, data in parts.items()]
    found, problems = read(tmp_path / "a.tar", tar([*samples(1), *bad, *samples(3)[3:]]))
    assert [sample.key for sample in found] == ["00000", "00001", "00002"]
    assert [problem.kind for problem in problems] == [kind]
    assert "a.tar/00000x" in problems[0].where


def test_one_empty_caption_of_several_costs_the_caption(tmp_path: Path) -> None:
    (sample,), (problem,) = read(
        tmp_path / "a.tar", tar([("1.jpg", jpeg()), ("1.json", b'{"caption": ["a", " ", "b"]}')])
    )
    assert sample.captions == ("a", "b")
    assert problem.kind is SampleProblemKind.EMPTY_CAPTION


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
        assert [problem.kind for problem in problems] == [SampleProblemKind.TRUNCATED_ARCHIVE]
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
    sparse = tarfile.TarInfo("sparse.jpg")
    sparse.size = 512
    header = bytearray(sparse.tobuf(tarfile.GNU_FORMAT))
    header[156:157] = tarfile.GNUTYPE_SPARSE
    header[386:398], header[398:410] = b"00000000000\0", b"00000001000\0"  # one extent: offset 0, 512 bytes
    header[483:495] = b"00000100000\0"  # 32 KiB when expanded
    header[148:156] = b" " * 8
    header[148:156] = f"{sum(header):06o}\0 ".encode()
    data = bytes(header) + b"\1" * 512 + buffer.getvalue()
    found, problems = read(tmp_path / "a.tar", data)
    assert [problem.kind for problem in problems] == [SampleProblemKind.IRREGULAR_MEMBER] * 4
    assert [sample.key for sample in found] == ["../../up", "/etc/root", "b\\xff"]
    assert [path.name for path in tmp_path.iterdir()] == ["a.tar"]


def read_all(path: Path, members: Members) -> tuple[dict[str, str], list[str], list[str]]:
    """Return captions by key, the kinds of the problems, and the kinds of what is left out."""
    path.write_bytes(tar(members))
    (archive,) = list_image_archives(str(path))
    items = list(read_samples(str(path), archive))
    return (
        {item.key: item.captions[0] for item in items if isinstance(item, ImageSample)},
        [item.kind for item in items if isinstance(item, Problem)],
        [item.kind for item in items if isinstance(item, LeftOut)],
    )


def pair(key: str) -> list[tuple[str, bytes]]:
    return [(f"{key}.jpg", jpeg()), (f"{key}.txt", key.encode())]


def test_a_key_is_everything_before_the_last_dot(tmp_path: Path) -> None:
    keys = ["photo.v1.2", "photo.v1.3", "photo", "dir.x/photo.v1", "photo.v2", "last"]
    found, problems, left_out = read_all(tmp_path / "a.tar", [member for key in keys for member in pair(key)])
    assert found == {key: key for key in keys}
    assert (problems, left_out) == ([], [])


@pytest.mark.parametrize(
    "order",
    [
        ["a.jpg", "a.seg.png", "a.txt"],
        ["a.seg.png", "a.jpg", "a.txt"],
        ["a.depth.png", "a.jpg", "a.seg.png", "a.txt"],
        ["a.depth.png", "a.jpg", "a.meta.json", "a.seg.png", "a.seg.x.png", "a.txt"],
    ],
)
def test_compound_extensions_beside_a_sample_are_left_out_and_counted(tmp_path: Path, order: list[str]) -> None:
    members = [(name, b"a" if name.endswith("txt") else b"{}" if name.endswith("json") else jpeg()) for name in order]
    found, problems, left_out = read_all(tmp_path / "a.tar", [*pair("0"), *members, *pair("b")])
    assert found == {"0": "0", "a": "a", "b": "b"}
    assert problems == []
    assert sorted(left_out) == sorted(name.removeprefix("a") for name in order if name.count(".") > 1)


def test_every_member_is_a_sample_a_problem_or_left_out(tmp_path: Path) -> None:
    bad = [("p.v1.jpg", jpeg()), ("p.v2.txt", b"alone"), ("q.jpg", jpeg())]
    other = [("0.cls", b"1"), ("0.npy", b"1"), ("README", b"x"), (".hidden.jpg", b"x"), ("._0.jpg", b"x")]
    found, problems, left_out = read_all(tmp_path / "a.tar", [*pair("0"), *other, *bad, *pair("1")])
    assert found == {"0": "0", "1": "1"}
    assert sorted(problems) == ["missing_caption", "missing_caption", "missing_image"]
    assert left_out == [".cls", ".npy", "no suffix", "no suffix", "no suffix"]


@settings(max_examples=60)
@given(st.lists(st.tuples(st.sampled_from(["a", "a.b", "a.b.c", "b", "b.x"]), st.sampled_from(SUFFIXES)), max_size=14))
def test_nothing_is_lost_in_silence_in_any_order(tmp_path_factory: pytest.TempPathFactory, names: Names) -> None:
    members = [(f"{key}.{suffix}", b"text" if suffix == "txt" else jpeg()) for key, suffix in names]
    path = tmp_path_factory.mktemp("any") / "a.tar"
    path.write_bytes(tar(members))
    (archive,) = list_image_archives(str(path))
    items = list(read_samples(str(path), archive))
    counted = sum(2 if isinstance(item, ImageSample) else 1 for item in items)
    is_empty = any(isinstance(item, Problem) and item.kind == "empty_archive" for item in items)
    assert counted - is_empty == len(members)


@pytest.mark.parametrize("form", ["GIF", "BMP", "TIFF", "WEBP", "PNG"])
def test_members_of_every_image_format_are_read(tmp_path: Path, form: str) -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (4, 4), "red").save(buffer, form)
    suffixes = {"TIFF": ["tif", "tiff", "TIF"]}.get(form, [form.lower()])
    members = [(f"{suffix}.{suffix}", buffer.getvalue()) for suffix in suffixes]
    captions = [(f"{suffix}.txt", b"red") for suffix in suffixes]
    pairs = [member for both in zip(members, captions, strict=True) for member in both]
    assert read_all(tmp_path / "a.tar", pairs) == (dict.fromkeys(suffixes, "red"), [], [])
    check_image(buffer.getvalue())
