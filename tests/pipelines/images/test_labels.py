"""Tests of the numbers in the JSON files beside images: which are read, and what is said if there are none."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import pytest

from pipelines.images.archives import list_image_archives
from pipelines.images.labels import read_numbers


def write_tar(path: Path, files: dict[str, bytes]) -> None:
    with tarfile.open(path, "w") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


def test_finite_numbers_are_read_and_everything_else_is_left_out(tmp_path: Path) -> None:
    records = {
        "a": {"n": 3}, "b/c.v1": {"n": 0.5}, "text": {"n": "3"}, "true": {"n": True}, "none": {"m": 1}, "list": [1],
        "nan": {"n": float("nan")},
    }  # fmt: skip
    files = {f"{key}.json": json.dumps(record).encode() for key, record in records.items()}
    write_tar(tmp_path / "0.tar", files | {"broken.json": b"{", "a.jpg": b"no image"})
    write_tar(tmp_path / "1.tar", {"d.JSON": b'{"n": -1}'})
    whole = (tmp_path / "1.tar").read_bytes()
    (tmp_path / "2.tar").write_bytes(whole[:520])  # cut within its first member
    numbers = read_numbers(str(tmp_path), list_image_archives(str(tmp_path)), "n")
    assert dict(numbers) == {"a": 3.0, "b/c.v1": 0.5, "d": -1.0}


def test_a_field_that_no_sample_has_is_refused_with_those_that_there_are(tmp_path: Path) -> None:
    write_tar(tmp_path / "0.tar", {"a.json": b'{"width": 3, "similarity": 0.5, "caption": "x"}'})
    with pytest.raises(ValueError, match=r"label = size: no \.json in .* fields with numbers are similarity, width"):
        next(read_numbers(str(tmp_path), list_image_archives(str(tmp_path)), "size"))


def test_the_first_archive_may_lack_the_field(tmp_path: Path) -> None:
    write_tar(tmp_path / "0.tar", {"a.json": b'{"m": 3}'})
    write_tar(tmp_path / "1.tar", {"b.json": b'{"n": 4}'})
    assert next(read_numbers(str(tmp_path), list_image_archives(str(tmp_path)), "n")) == ("b", 4.0)
