"""Tests of pipelines.images.caption_files: captions in a JSON belong to the right images, and choose which are read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from image_archive_support import jpeg, read, tar

from pipelines.images.archives import list_image_archives, read_samples
from pipelines.images.caption_files import CaptionFile
from pipelines.images.samples import ImageSample, LeftOut


def captions(tmp_path: Path, content: object, *splits: str) -> CaptionFile:
    path = tmp_path / f"captions{len(list(tmp_path.iterdir()))}.json"
    path.write_text(json.dumps(content))
    return CaptionFile.load(str(path), splits)


def karpathy(*images: tuple[str, str, str, list[str]]) -> dict[str, object]:
    return {
        "images": [
            {"filepath": directory, "filename": name, "split": split, "sentences": [{"raw": text} for text in texts]}
            for directory, name, split, texts in images
        ]
    }


def test_both_forms_of_captions_are_read_and_a_split_is_selected(tmp_path: Path) -> None:
    content = karpathy(
        ("val", "1.jpg", "test", ["a", "b"]), ("val", "2.jpg", "val", ["c"]), ("", "3.jpg", "test", ["d"])
    )
    assert captions(tmp_path, content, "test").captions == {"val/1.jpg": ("a", "b"), "3.jpg": ("d",)}
    everything = {"val/1.jpg": ("a", "b"), "val/2.jpg": ("c",), "3.jpg": ("d",)}
    assert captions(tmp_path, content).captions == captions(tmp_path, content, "").captions == everything
    assert captions(tmp_path, content, "val", "test").captions == everything
    with pytest.raises(ValueError, match=r"'training' is not in .* it has test, val"):
        captions(tmp_path, content, "test", "training")
    listed = [{"image": "i/1.jpg", "caption": "a"}, {"image": "2.jpg", "caption": ["b", "c"]}]
    assert captions(tmp_path, [*listed, {"image": "i/1.jpg", "caption": "d"}]).captions == {
        "i/1.jpg": ("a", "d"),
        "2.jpg": ("b", "c"),
    }
    with pytest.raises(ValueError, match="leave it empty"):
        captions(tmp_path, listed, "test")
    for bad in ({"annotations": []}, [["1.jpg", "a"]], "text", []):
        with pytest.raises(ValueError, match=r"captions\d+\.json"):
            captions(tmp_path, bad)


def test_an_image_is_found_by_either_paths_ending(tmp_path: Path) -> None:
    file = captions(
        tmp_path, [{"image": name, "caption": "c"} for name in ["val/1.jpg", "a/2.jpg", "b/2.jpg", "3.jpg"]]
    )
    for path, expected in {
        "val/1.jpg": "val/1.jpg",
        "coco/val/1.jpg": "val/1.jpg",
        "1.jpg": "val/1.jpg",
        "train/1.jpg": None,
        "2.jpg": None,
        "x/b/2.jpg": "b/2.jpg",
        "deep/er/3.jpg": "3.jpg",
        "13.jpg": None,
    }.items():
        assert file.find(path) == expected


def test_only_named_images_of_a_tar_or_a_directory_are_read(tmp_path: Path) -> None:
    file = captions(tmp_path, karpathy(*(("", f"{n}.jpg", "test", [f"caption {n}", "again"]) for n in (1, 3))))
    found, problems = read(tmp_path / "a.tar", tar([(f"images/{n}.jpg", jpeg(n)) for n in range(5)]))
    assert not found
    assert len(problems) == 5
    found, problems = read(tmp_path / "a.tar", tar([(f"images/{n}.jpg", jpeg(n)) for n in range(5)]), file)
    directory = tmp_path / "files" / "below"
    directory.mkdir(parents=True)
    for number in range(5):
        (directory / f"{number}.jpg").write_bytes(jpeg(number))
    (archive,) = list_image_archives(str(tmp_path / "files"))
    items = list(read_samples(str(tmp_path / "files"), archive, file))
    of_files = [item for item in items if not isinstance(item, LeftOut)]
    assert len(items) - len(of_files) == 3
    assert not problems
    for sample, other in zip(found, of_files, strict=True):
        assert isinstance(other, ImageSample)
        assert (sample.key, sample.data, sample.captions) == (other.key, other.data, other.captions)
        assert other.offset == 0
        assert (directory.parent / other.member).read_bytes() == other.data
    assert [sample.key for sample in found] == ["1.jpg", "3.jpg"]


def test_a_file_that_is_gone_costs_itself(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"{number}.jpg").write_bytes(jpeg(number))
    (archive,) = list_image_archives(str(tmp_path))
    (tmp_path / "1.jpg").unlink()
    file = captions(tmp_path, [{"image": f"{number}.jpg", "caption": "c"} for number in range(3)])
    items = list(read_samples(str(tmp_path), archive, file))
    assert [getattr(item, "key", None) or getattr(item, "kind", None) for item in items] == [
        "0.jpg", "unreadable_file", "2.jpg"
    ]  # fmt: skip
