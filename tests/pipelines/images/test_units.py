"""Tests of the units of images: the parts of a tar, joined, are what is made of the whole tar, wherever it is divided."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
import webdataset
from hypothesis import given, settings
from hypothesis import strategies as st
from image_archive_support import Members, jpeg, tar

from pipelines.images.archives import ImageArchive, list_image_archives, read_samples
from pipelines.images.caption_files import CaptionFile
from pipelines.images.decoding import MAX_PIXELS
from pipelines.images.index import index_archive, index_name
from pipelines.images.samples import ImageSample, LeftOut
from pipelines.images.units import IndexTask, Unit, divide_archive
from pipelines.losses import losses_name
from pipelines.storage import write_json

JPEG = jpeg()
TRICKY = ["a", "a.b", "a.b.c", "b", "b.x", "d/a", "d/a.b"]
SUFFIXES = ["jpg", "txt", "json", "cls", "PNG"]


def member(name: str) -> tuple[str, bytes]:
    return name, {"txt": name.encode(), "json": b'{"caption": ["one", "two"]}'}.get(name[-4:].lstrip("."), JPEG)


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


def index_in_parts(source: Path, archive: ImageArchive, captions: str, directory: Path, part_bytes: int) -> Any:
    """Do what `index_archives` does, without Ray, and last parts first; return the summary and the number of parts."""
    directory.mkdir(exist_ok=True)
    task = IndexTask(
        source=str(source), archives=[archive], captions=captions, splits=(), max_pixels=MAX_PIXELS,
        directory=str(directory),
    )  # fmt: skip
    units = [Unit(archive=0, part=part) for part in divide_archive(str(source), archive, part_bytes)]
    for unit in reversed(units):
        write_json(f"{directory}/{unit.name}.json", task.index(unit))
    if len(units) == 1:
        return task.index(units[0]), 1
    return json.loads(json.dumps(task.join(units))), len(units)


def compare(tmp_path: Path, data: bytes, part_bytes: int, captions: str = "") -> int:
    """Assert that the parts of a tar, joined, are byte for byte what the whole tar gives; return the number of parts."""
    path = tmp_path / "a.tar"
    path.write_bytes(data)
    (archive,) = list_image_archives(str(path))
    named = CaptionFile.load(captions) if captions else None
    whole = index_whole(path, archive, named, tmp_path / "whole")
    joined, num_parts = index_in_parts(path, archive, captions, tmp_path / f"parts-{part_bytes}", part_bytes)
    assert joined == whole
    assert list(joined["left_out"]) == list(whole["left_out"])
    for name in (index_name(0), losses_name(index_name(0))):
        parts = tmp_path / f"parts-{part_bytes}" / name
        assert parts.read_bytes() == (tmp_path / "whole" / name).read_bytes()
    return num_parts


@pytest.mark.parametrize("part_bytes", [1, 3000, 20_000, 10**9])
def test_parts_joined_are_the_whole(tmp_path: Path, part_bytes: int) -> None:
    num_parts = compare(tmp_path, tar(mixed(40)), part_bytes)
    # With a byte a part, a part is a sample; samples that are not whole are samples too.
    assert num_parts == 40 if part_bytes == 1 else (num_parts == 1) == (part_bytes == 10**9)


@settings(max_examples=60, deadline=None)
@given(
    names=st.lists(st.tuples(st.sampled_from(TRICKY), st.sampled_from(SUFFIXES)), min_size=1, max_size=14),
    part_bytes=st.integers(1, 6000),
    cut=st.none() | st.integers(0, 30_000),
)
def test_any_order_of_members_and_any_cut_of_the_tar(
    tmp_path_factory: pytest.TempPathFactory, names: list[tuple[str, str]], part_bytes: int, cut: int | None
) -> None:
    data = tar([member(f"{key}.{suffix}") for key, suffix in names])
    compare(tmp_path_factory.mktemp("any"), data[:cut], part_bytes)


def test_no_sample_is_divided_and_every_one_is_webdatasets(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(tar([member(f"{key:03d}.{suffix}") for key in range(30) for suffix in ("jpg", "cls", "txt")]))
    (archive,) = list_image_archives(str(path))
    expected = [sample["__key__"] for sample in webdataset.WebDataset(str(path), shardshuffle=False)]
    for part_bytes in (1, 2500, 7000, 30_000):
        parts = divide_archive(str(path), archive, part_bytes)
        found = [list(read_samples(str(path), archive, part=part)) for part in parts]
        assert [item.key for items in found for item in items if isinstance(item, ImageSample)] == expected
        assert all(any(isinstance(item, ImageSample) for item in items) for items in found)
        assert sum(isinstance(item, LeftOut) for items in found for item in items) == 30
        assert all(part.stop is None or part.stop - part.start >= part_bytes for part in parts)


@pytest.mark.parametrize("keep", [0.3, 0.72, 0.98])
@pytest.mark.parametrize("part_bytes", [1, 4000])
def test_a_cut_or_damaged_tar_is_damaged_once(tmp_path: Path, keep: float, part_bytes: int) -> None:
    data = tar(mixed(20))
    at = int(len(data) * keep)
    assert compare(tmp_path, data[:at], part_bytes) > 1
    with tarfile.open(fileobj=io.BytesIO(data)) as file:  # A header in the middle is overwritten.
        offset = next(info.offset for info in file if info.offset > at // 2)
    assert compare(tmp_path, data[:offset] + b"\xff" * 512 + data[offset + 512 :], part_bytes) > 1


def test_captions_of_a_file_of_their_own(tmp_path: Path) -> None:
    named = [{"image": f"train/{number}.jpg", "caption": f"caption {number}"} for number in range(0, 24, 2)]
    (tmp_path / "captions.json").write_text(json.dumps(named))
    members = [(f"train/{number}.jpg", jpeg(number)) for number in range(20)]
    assert compare(tmp_path, tar(members), 1, captions=str(tmp_path / "captions.json")) == 20


@pytest.mark.parametrize(("name", "form"), [("GNU", tarfile.GNU_FORMAT), ("pax", tarfile.PAX_FORMAT)])
def test_extended_headers_stay_with_their_members(tmp_path: Path, name: str, form: int) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form) as file:
        for key in range(8):
            for suffix, data in (("jpg", jpeg(key)), ("txt", name.encode())):
                info = tarfile.TarInfo(f"{'directory/' * 20}{key}.{suffix}")
                info.size = len(data)
                file.addfile(info, io.BytesIO(data))
    assert compare(tmp_path, buffer.getvalue(), 1) == 8


def test_a_tar_with_a_global_header_is_not_divided(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT, pax_headers={"path": "all.jpg"}) as file:
        for key in range(4):
            info = tarfile.TarInfo(f"{key}.jpg")
            info.size = len(JPEG)
            file.addfile(info, io.BytesIO(JPEG))
    assert compare(tmp_path, buffer.getvalue(), 1) == 1


@pytest.mark.parametrize("num_kinds", [10, 31, 32, 33, 80])
def test_kinds_of_members_that_are_left_out_are_counted_as_in_the_whole(tmp_path: Path, num_kinds: int) -> None:
    members: Members = [
        item
        for key in range(90)
        for item in (member(f"{key:02d}.jpg"), (f"{key:02d}.k{(key * 7) % num_kinds}", b"x"), member(f"{key:02d}.txt"))
    ]
    for part_bytes in (1, 50_000):
        assert compare(tmp_path, tar(members), part_bytes) > 1


def test_a_tar_that_is_written_again_between_its_parts_is_indexed_whole(tmp_path: Path) -> None:
    path, directory = tmp_path / "a.tar", tmp_path / "parts"
    path.write_bytes(tar(mixed(6)))
    (archive,) = list_image_archives(str(path))
    directory.mkdir()
    task = IndexTask(
        source=str(path), archives=[archive], captions="", splits=(), max_pixels=MAX_PIXELS, directory=str(directory)
    )
    units = [Unit(archive=0, part=part) for part in divide_archive(str(path), archive, 1)]
    for unit in units:
        write_json(f"{directory}/{unit.name}.json", task.index(unit))
    path.write_bytes(tar([*mixed(6)[3:], member("new.jpg"), member("new.txt")]))
    assert task.join(units) == index_whole(path, archive, None, tmp_path / "whole")
