"""Tars of image–text pairs prepared as a whole: what is kept, counted and named, and what goes on."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from image_archive_support import jpeg
from text_archive_support import tar

from pipelines.images.archives import ImageSample
from pipelines.images.manifest import ImageManifest, index_name, read_index
from pipelines.images.pairs import PairSource
from pipelines.images.prepare import IndexTask, PrepareImagesConfig, check_source, describe, prepare_images
from pipelines.problems import TooManyProblemsError
from pipelines.storage import MANIFEST_FILE
from pipelines.text.manifest import Manifest
from pipelines.text.packing import DocumentConfig


def shard(keys: range) -> bytes:
    """Return a tar as img2dataset writes it."""
    return tar(
        (f"{key:09d}.{suffix}", data)
        for key in keys
        for suffix, data in (("jpg", jpeg(key, (32, 24))), ("txt", f"caption {key}".encode()), ("json", b"{}"))
    )


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Write five shards, and return their directory.

    The first is whole, the second is cut in its fourth sample, the third is not a tar, the fourth repeats three keys of the
    first and one of its own, and the fifth is empty.
    """
    directory = tmp_path / "cc"
    directory.mkdir()
    cut, own = shard(range(2000, 2010)), shard(range(107, 115))
    cut = cut[: cut.index(b"000002003.jpg") + 612]  # a header has 512 bytes
    own = own[: own.rindex(b"000000114.json") + 1024] + shard(range(107, 108))
    contents = [shard(range(100, 110)), cut, b"\xff" * 2000, own, shard(range(0))]
    for number, content in enumerate(contents):
        (directory / f"{number:05d}.tar").write_bytes(content)
    (directory / "00000_stats.json").write_text("{}")
    return directory


def prepare(source: Path, root: Path, max_bad_share: float = 0.5, captions: str = "") -> ImageManifest:
    config = PrepareImagesConfig(source=str(source), max_bad_share=max_bad_share, captions=captions)
    return prepare_images(config, str(root), max_bad_share_field="data.max_bad_share")


def test_bad_shards_cost_what_they_lack_and_the_share_is_held(shards: Path, tmp_path: Path) -> None:
    manifest = prepare(shards, tmp_path / "prepared")
    assert manifest.shard_sizes == (10, 3, 0, 8, 0)
    # Seven more samples were behind the cut, eight by the estimate, and what is not a tar may hold one at least.
    assert manifest.problems == {"truncated_archive": 2, "unread_sample": 9, "duplicated_key": 1, "empty_archive": 1}
    kept = [key for number in range(5) for key in read_index(manifest, number).column("key").to_pylist()]
    own = [f"{key:09d}" for key in [*range(100, 110), *range(2000, 2003)]]
    assert kept == [*own, *(f"00003.tar/{key:09d}" for key in range(107, 115))]
    assert "not read: 1 other files (00000_stats.json)" in describe(manifest)
    with pytest.raises(
        TooManyProblemsError,
        match=r"13 of 34 records .*cc are unreadable \(38\.24%\), more than data\.max_bad_share = 1\.00%.*"
        r"00001\.tar: 1 truncated_archive, 8 unread_sample, .*00003\.tar",
    ):
        prepare(shards, tmp_path / "prepared", max_bad_share=0.01)


def test_other_content_is_prepared_in_another_directory(shards: Path, tmp_path: Path) -> None:
    first = prepare(shards, tmp_path)
    assert prepare(shards, tmp_path) == first
    (shards / "00004.tar").write_bytes(shard(range(500, 503)))
    other = prepare(shards, tmp_path)
    assert other.directory != first.directory
    assert other.num_pairs == first.num_pairs + 3
    size = (shards / "00004.tar").stat().st_size
    (shards / "00004.tar").write_bytes(shard(range(600, 603)))  # in the same size
    assert (shards / "00004.tar").stat().st_size == size
    other = prepare(shards, tmp_path)
    assert "000000600" in read_index(other, 4).column("key").to_pylist()
    os.utime(shards / "00000.tar")
    touched = prepare(shards, tmp_path)
    assert touched.directory != other.directory
    assert touched.digest == other.digest  # so that a run goes on


def test_keys_are_unique_within_an_archive_and_of_images_with_a_file_of_captions_within_all(tmp_path: Path) -> None:
    for name in ("cc3m", "cc12m"):
        (tmp_path / "union" / name).mkdir(parents=True)
        (tmp_path / "union" / name / "00000.tar").write_bytes(shard(range(len(name), len(name) + 40)))
    assert prepare(tmp_path / "union", tmp_path / "all", max_bad_share=0).num_pairs == 80
    parts = f"file://{tmp_path}/union/{{cc3m,cc12m}}/*.tar?x=y"
    manifest = prepare_images(PrepareImagesConfig(source=parts, max_bad_share=0), str(tmp_path / "parts"))
    assert manifest.num_pairs == 80
    assert "?" not in manifest.directory  # what follows would be no part of the names of files in a store
    assert len(PairSource(manifest=manifest, image_size=8).read_images([0, 79])) == 2
    # "cc3m" has keys 4 to 43, "cc12m" 5 to 44.
    keys = [read_index(manifest, number).column("key").to_pylist() for number in range(2)]
    assert (keys[0][0], keys[1][0]) == ("000000005", "cc3m/00000.tar/000000004")
    assert len({*keys[0], *keys[1]}) == 80
    (tmp_path / "captions.json").write_text('[{"image": "000000010.jpg", "caption": ["a", null]}, {"image": null}]')
    manifest = prepare(tmp_path / "union", tmp_path / "named", 0.8, captions=str(tmp_path / "captions.json"))
    assert (manifest.num_pairs, manifest.shard_sizes) == (1, (1, 0))
    assert manifest.problems == {"duplicated_key": 1, "invalid_record": 2}


def test_an_archive_that_is_written_again_while_it_is_read_is_refused(shards: Path, tmp_path: Path) -> None:
    config = PrepareImagesConfig(source=str(shards / "00000.tar"))
    task = IndexTask(config=config, archives=check_source(config)[0], directory=str(tmp_path))

    class Replacing(type(task)):
        def _usable(self, *arguments: Any) -> Iterator[ImageSample]:
            samples = super()._usable(*arguments)
            yield next(samples)
            (shards / "00000.tar").write_bytes(shard(range(300, 310)))
            yield from samples

    replacing = Replacing(**{name: getattr(task, name) for name in task.__dataclass_fields__})
    with pytest.raises(OSError, match=r"00000\.tar was written again while it was read"):
        replacing.run(0)
    index = tmp_path / index_name(0)
    task.run(0)
    with index.open("rb") as mapped:
        assert len(task.finish([task.run(0)]).shards) == 1
        assert not os.path.samestat(os.fstat(mapped.fileno()), index.stat())  # whoever has mapped it keeps it


def test_every_lost_image_is_listed_and_what_only_all_archives_together_show(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    for number in range(20):
        (tmp_path / "images" / f"{number}.jpg").write_bytes(b"no image" if number else jpeg())
    named = [{"image": f"{number}.jpg", "caption": "c"} for number in range(30)]
    (tmp_path / "captions.json").write_text(json.dumps(named))
    source, captions, listed = (str(tmp_path / name) for name in ("images", "captions.json", "all.jsonl"))
    config = PrepareImagesConfig(source=source, captions=captions, max_bad_share=0.99)
    manifest = prepare_images(config, str(tmp_path / "prepared"), losses=listed)
    losses = [json.loads(line) for line in Path(listed).read_text().splitlines()]
    assert {(loss["kind"], loss["where"]) for loss in losses} == {
        ("corrupt_image" if number < 20 else "absent_image", f"{number}.jpg") for number in range(1, 30)
    }
    assert Counter(loss["kind"] for loss in losses) == manifest.problems


def test_a_file_of_captions_without_its_invalid_records_is_judged_anew(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "0.jpg").write_bytes(jpeg())
    captions = tmp_path / "captions.json"
    for records, lost in (("{}, ", {"invalid_record": 1}), ("", {})):
        captions.write_text(f'[{records}{{"image": "0.jpg", "caption": "c"}}]')
        assert prepare(tmp_path / "images", tmp_path / "prepared", captions=str(captions)).problems == lost


def test_a_manifest_is_read_again_and_another_kind_version_or_none_is_refused(tmp_path: Path) -> None:
    directory = str(tmp_path)
    for kind in (Manifest, ImageManifest):
        with pytest.raises(FileNotFoundError, match=r"it is not a \(completely\) prepared data set"):
            kind.load(directory)
    images = ImageManifest(directory=directory, source="data", max_pixels=100, shards=[], captions=None)
    images.save()
    assert ImageManifest.load(directory) == images
    with pytest.raises(ValueError, match=r"does not hold prepared text of version 4.*: prepare it again"):
        Manifest.load(directory)
    layout = DocumentConfig(least_num_tokens=4, vocab_size=50)
    text = Manifest(directory=directory, tokenizer_digest="abc", layout=layout, archives=[])
    text.save()
    assert Manifest.load(directory) == text
    with pytest.raises(ValueError, match=r"does not hold prepared images of version 3.*: prepare it again"):
        ImageManifest.load(directory)
    file = tmp_path / MANIFEST_FILE
    file.write_text(json.dumps(json.loads(file.read_text()) | {"version": 2}))
    with pytest.raises(ValueError, match="does not hold prepared text of version 4"):
        Manifest.load(directory)


@pytest.mark.parametrize(
    ("label", "beside", "lost"),
    [
        (
            "folder",
            {"./a/cat/1": (), "b/dog/2": (), "3": (), "./4": (), "b/._dog/2": ()},
            {"images in no folder of a class": 3},
        ),
        (
            "cls",
            {"1": (("cls", b"cat"),), "2": (("cls", b"dog\n"),), "3": (("txt", b"a caption"),)},
            {"missing_caption": 1, ".txt": 1},
        ),
        (
            "kind",
            {"1": (("json", b'{"kind": "cat"}'),), "2": (("json", b'{"kind": "dog"}'),), "3": (("json", b"{}"),)},
            {"missing_caption": 1},
        ),
    ],
)
def test_classes_take_the_place_of_captions(
    label: str, beside: dict[str, tuple[tuple[str, bytes], ...]], lost: dict[str, int], tmp_path: Path
) -> None:
    files = {f"{key}.{suffix}": data for key, more in beside.items() for suffix, data in (("jpg", jpeg()), *more)}
    (tmp_path / "a.tar").write_bytes(tar(files.items()))
    config = PrepareImagesConfig(source=str(tmp_path / "a.tar"), label=label, max_bad_share=0.5)
    manifest = prepare_images(config, str(tmp_path / "prepared"))
    assert read_index(manifest, 0).column("caption").to_pylist() == ["cat", "dog"]
    assert {**manifest.problems, **manifest.left_out} == lost
    for name, data in files.items():
        (tmp_path / "files" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "files" / name).write_bytes(data)
    config = PrepareImagesConfig(source=str(tmp_path / "files"), label=label)
    if label == "folder":
        manifest = prepare_images(config, str(tmp_path / "prepared"))
        assert read_index(manifest, 0).column("caption").to_pylist() == ["cat", "dog"]
    else:
        with pytest.raises(ValueError, match=f"or label must be folder instead of '{label}'"):
            check_source(config)
    with pytest.raises(ValueError, match=r"takes the place of captions"):
        PrepareImagesConfig(source="x", captions="y", label=label)
