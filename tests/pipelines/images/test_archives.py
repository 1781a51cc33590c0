"""Tars of images: complete samples are read exactly, damage costs its sample, and parts joined are what the whole gives."""

from __future__ import annotations

import io
import json
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import webdataset
from hypothesis import given
from hypothesis import strategies as st
from image_archive_support import Members, jpeg, read, tar
from PIL import Image

from pipelines.images.archives import ImageArchive, list_image_archives, read_samples
from pipelines.images.caption_files import CaptionFile
from pipelines.images.decoding import MAX_PIXELS, check_image
from pipelines.images.index import index_archive, index_name
from pipelines.images.samples import ImageSample, LeftOut, SampleProblemKind
from pipelines.images.units import IndexTask, Unit, divide_archive
from pipelines.losses import losses_name
from pipelines.problems import Problem
from pipelines.storage import write_json

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
        ({"txt": b"from txt", "json": b"{"}, ("from txt",)),
        ({"txt": b"from txt", "json": b'{"caption": ["one", " two "]}'}, ("one", "two")),
        ({"txt": "na\u00efve \u2603".encode()}, ("na\u00efve \u2603",)),
        ({"json": b'{"caption": ["a", " ", "b"]}'}, ("a", "b")),  # An empty one of several costs itself.
    ],
)
def test_captions_come_from_a_json_list_else_the_txt_else_the_json(
    tmp_path: Path, members: dict[str, bytes], captions: tuple[str, ...]
) -> None:
    (sample,), problems = read(
        tmp_path / "a.tar", tar([("1.jpg", jpeg()), *((f"1.{s}", d) for s, d in members.items())])
    )
    assert sample.captions == captions
    assert [problem.kind for problem in problems] == [SampleProblemKind.EMPTY_CAPTION] * (captions == ("a", "b"))


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


def read_all(path: Path, members: Members) -> tuple[Counter[str], list[str], list[str]]:
    """Return the keys of samples, the kinds of the problems, and the kinds of what is left out."""
    path.write_bytes(tar(members))
    (archive,) = list_image_archives(str(path))
    items = list(read_samples(str(path), archive))
    found = Counter(item.key for item in items if isinstance(item, ImageSample))
    problems, left_out = ([item.kind for item in items if isinstance(item, kind)] for kind in (Problem, LeftOut))
    return found, problems, left_out


def pair(key: str) -> list[tuple[str, bytes]]:
    return [(f"{key}.jpg", jpeg()), (f"{key}.txt", key.encode())]


def test_a_key_is_everything_before_the_last_dot_and_every_member_is_counted(tmp_path: Path) -> None:
    keys = ["photo.v1.2", "photo.v1.3", "photo", "dir.x/photo.v1", "photo.v2", "last"]
    bad = [("p.v1.jpg", jpeg()), ("p.v2.txt", b"alone"), ("q.jpg", jpeg())]
    other = [("0.cls", b"1"), ("0.npy", b"1"), ("README", b"x"), (".hidden.jpg", b"x"), ("._0.jpg", b"x")]
    # Compound extensions beside a sample are left out, wherever they are.
    beside = ["a.depth.png", "a.jpg", "a.meta.json", "a.seg.png", "a.seg.x.png", "a.txt"]
    compound = [(name, b"a" if name.endswith("txt") else b"{}" if name.endswith("json") else jpeg()) for name in beside]
    pairs = [member for key in keys for member in pair(key)]
    found, problems, left_out = read_all(tmp_path / "a.tar", [*pair("0"), *other, *compound, *bad, *pairs])
    assert found == Counter(["0", "a", *keys])
    assert sorted(problems) == ["missing_caption", "missing_caption", "missing_image"]
    assert left_out[:5] == [".cls", ".npy", "no suffix", "no suffix", "no suffix"]
    assert sorted(left_out[5:]) == [".depth.png", ".meta.json", ".seg.png", ".seg.x.png"]


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


@given(MEMBERS)
def test_nothing_is_lost_in_silence_in_any_order(
    tmp_path_factory: pytest.TempPathFactory, members: list[tuple[str, bytes]]
) -> None:
    members = [member for member in members if not member[0].endswith("json")]  # those that a sample need not have
    found, problems, left_out = read_all(tmp_path_factory.mktemp("any") / "a.tar", members)
    assert 2 * found.total() + len(problems) + len(left_out) - ("empty_archive" in problems) == len(members)


@pytest.mark.parametrize("form", ["GIF", "BMP", "TIFF", "WEBP", "PNG"])
def test_members_of_every_image_format_are_read(tmp_path: Path, form: str) -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (4, 4), "red").save(buffer, form)
    suffixes = {"TIFF": ["tif", "tiff", "TIF"]}.get(form, [form.lower()])
    members = [((f"{suffix}.{suffix}", buffer.getvalue()), (f"{suffix}.txt", b"red")) for suffix in suffixes]
    assert read_all(tmp_path / "a.tar", sum(members, ())) == (Counter(suffixes), [], [])
    check_image(buffer.getvalue())


# ---- parts of a tar --------------------------------------------------------------------------------------------------


def mixed(num: int) -> list[tuple[str, bytes]]:
    """Return members of samples, of which some are broken, have no partner, or have members of other kinds among them."""
    members = []
    for number in range(num):
        key = f"{number:04d}"
        image = b"no image" if number % 7 == 3 else jpeg(number, (20 + number, 16))
        members.append((f"{key}.jpg", image))
        if number % 5 == 1:
            members += [(f"{key}.npy", b"array"), (f"{key}.seg.png", JPEG)]
        if number % 11 != 4:
            members.append((f"{key}.txt", f"caption {number}".encode()))
        if number % 3 == 0:
            members.append((f"{key}.json", json.dumps({"caption": [f"first {number}", f"second {number}"]}).encode()))
    return members


def index_whole(source: Path, archive: ImageArchive, captions: CaptionFile | None, directory: Path) -> dict[str, Any]:
    directory.mkdir(exist_ok=True)
    return index_archive(str(source), archive, captions, max_pixels=MAX_PIXELS, index=f"{directory}/{index_name(0)}")


def index_parts(path: Path, archive: ImageArchive, captions: str, directory: Path, part_bytes: int) -> tuple[Any, Any]:
    """Index the parts of a tar, the last one first, as `index_archives` does with Ray; return the task and the parts."""
    directory.mkdir(exist_ok=True)
    task = IndexTask(
        source=str(path), archives=[archive], captions=captions, splits=(), max_pixels=MAX_PIXELS,
        directory=str(directory),
    )  # fmt: skip
    units = [Unit(archive=0, part=part) for part in divide_archive(str(path), archive, part_bytes)]
    for unit in reversed(units):
        write_json(f"{directory}/{unit.name}.json", task.index(unit))
    return task, units


def compare(tmp_path: Path, data: bytes, part_bytes: int, captions: str = "") -> int:
    """Assert that the parts of a tar, joined, are byte for byte what the whole tar gives; return the number of parts."""
    path, directory = tmp_path / "a.tar", tmp_path / f"parts-{part_bytes}"
    path.write_bytes(data)
    (archive,) = list_image_archives(str(path))
    whole = index_whole(path, archive, CaptionFile.load(captions) if captions else None, tmp_path / "whole")
    task, units = index_parts(path, archive, captions, directory, part_bytes)
    joined = task.index(units[0]) if len(units) == 1 else json.loads(json.dumps(task.join(units)))
    assert joined == whole
    assert list(joined["left_out"]) == list(whole["left_out"])
    for name in (index_name(0), losses_name(index_name(0))):
        assert (directory / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    return len(units)


@pytest.mark.parametrize("part_bytes", [1, 3000, 10**9])
def test_parts_joined_are_the_whole(tmp_path: Path, part_bytes: int) -> None:
    num_parts = compare(tmp_path, tar(mixed(40)), part_bytes)
    # With a byte a part, a part is a sample; samples that are not whole are samples too.
    assert num_parts == 40 if part_bytes == 1 else (num_parts == 1) == (part_bytes == 10**9)


@given(MEMBERS, st.integers(1, 6000), st.none() | st.integers(0, 30_000))
def test_any_order_of_members_and_any_cut_of_the_tar(
    tmp_path_factory: pytest.TempPathFactory, members: list[tuple[str, bytes]], part_bytes: int, cut: int | None
) -> None:
    compare(tmp_path_factory.mktemp("any"), tar(members)[:cut], part_bytes)


def test_no_sample_is_divided_and_every_one_is_webdatasets(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    keys = [f"{number:03d}" for number in range(30)]
    path.write_bytes(tar([item for key in keys for item in (pair(key)[0], (f"{key}.cls", b"1"), pair(key)[1])]))
    (archive,) = list_image_archives(str(path))
    assert [sample["__key__"] for sample in webdataset.WebDataset(str(path), shardshuffle=False)] == keys
    for part_bytes in (1, 2500, 7000, 30_000):
        parts = divide_archive(str(path), archive, part_bytes)
        found = [list(read_samples(str(path), archive, part=part)) for part in parts]
        assert [item.key for items in found for item in items if isinstance(item, ImageSample)] == keys
        assert all(any(isinstance(item, ImageSample) for item in items) for items in found)
        assert sum(isinstance(item, LeftOut) for items in found for item in items) == 30
        assert all(part.stop is None or part.stop - part.start >= part_bytes for part in parts)


def test_a_tar_with_a_broken_header_is_damaged_once(tmp_path: Path) -> None:
    data = tar(mixed(20))
    with tarfile.open(fileobj=io.BytesIO(data)) as file:
        offset = next(info.offset for info in file if info.offset > len(data) // 2)
    assert compare(tmp_path, data[:offset] + b"\xff" * 512 + data[offset + 512 :], 1) > 1


def test_captions_of_a_file_of_their_own(tmp_path: Path) -> None:
    named = [{"image": f"train/{number}.jpg", "caption": f"caption {number}"} for number in range(0, 24, 2)]
    (tmp_path / "captions.json").write_text(json.dumps(named))
    members = [(f"train/{number}.jpg", jpeg(number)) for number in range(20)]
    assert compare(tmp_path, tar(members), 1, captions=str(tmp_path / "captions.json")) == 20


@pytest.mark.parametrize(
    ("form", "headers", "num_parts"),
    [(tarfile.GNU_FORMAT, {}, 8), (tarfile.PAX_FORMAT, {}, 8), (tarfile.PAX_FORMAT, {"path": "all.jpg"}, 1)],
)
def test_extended_headers_stay_with_their_members_and_a_global_one_keeps_a_tar_whole(
    tmp_path: Path, form: int, headers: dict[str, str], num_parts: int
) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form, pax_headers=headers) as file:
        for key in range(8):
            for suffix, data in (("jpg", jpeg(key)), ("txt", b"caption")):
                info = tarfile.TarInfo(f"{'directory/' * 20}{key}.{suffix}")
                info.size = len(data)
                file.addfile(info, io.BytesIO(data))
    assert compare(tmp_path, buffer.getvalue(), 1) == num_parts


@pytest.mark.parametrize("num_kinds", [32, 33])
def test_kinds_of_members_that_are_left_out_are_counted_as_in_the_whole(tmp_path: Path, num_kinds: int) -> None:
    suffixes = [("jpg", f"k{(key * 7) % num_kinds}", "txt") for key in range(90)]
    members = [(f"{key:02d}.{suffix}", b"caption") for key in range(90) for suffix in suffixes[key]]
    for part_bytes in (1, 50_000):
        assert compare(tmp_path, tar(members), part_bytes) > 1


def test_a_tar_that_is_written_again_between_its_parts_is_indexed_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(tar(mixed(6)))
    (archive,) = list_image_archives(str(path))
    task, units = index_parts(path, archive, "", tmp_path / "parts", 1)
    path.write_bytes(tar([*mixed(6)[3:], *pair("new")]))
    assert task.join(units) == index_whole(path, archive, None, tmp_path / "whole")
