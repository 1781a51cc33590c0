"""Tars of image–text pairs prepared as a whole: what is kept, counted and named, and what goes on."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from image_archive_support import jpeg, tar

from pipelines.images.manifest import ImageManifest, read_index
from pipelines.images.prepare import PrepareImagesConfig, prepare_images
from pipelines.problems import TooManyProblemsError


def shard(keys: range) -> bytes:
    """Return a tar as img2dataset writes it."""
    return tar(
        (f"{key:09d}.{suffix}", data)
        for key in keys
        for suffix, data in (("jpg", jpeg(key, (32, 24))), ("txt", f"caption {key}".encode()), ("json", b"{}"))
    )


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Write five shards with gaps between their keys, and return their directory.

    The first shard is whole, the second is cut in its fourth sample, the third is not a tar, the fourth repeats three
    keys of the first, and the fifth is empty.
    """
    directory = tmp_path / "cc"
    directory.mkdir()
    whole, cut = shard(range(100, 110)), shard(range(2000, 2010))
    cut = cut[: cut.index(b"000002003.jpg") + 612]  # a header has 512 bytes
    contents = [whole, cut, b"\xff" * 2000, shard(range(107, 115)), shard(range(0))]
    for number, content in enumerate(contents):
        (directory / f"{number:05d}.tar").write_bytes(content)
    (directory / "00000_stats.json").write_text("{}")
    return directory


def prepare(source: Path, root: Path, max_bad_share: float = 0.5, part_bytes: int | None = None) -> ImageManifest:
    config = PrepareImagesConfig(source=str(source), max_bad_share=max_bad_share)
    return prepare_images(config, str(root), max_bad_share_field="data.max_bad_share", part_bytes=part_bytes)


def test_bad_shards_cost_what_they_lack_and_the_share_is_held(shards: Path, tmp_path: Path) -> None:
    manifest = prepare(shards, tmp_path / "prepared")
    assert manifest.shard_sizes == (10, 3, 0, 5, 0)
    # Six more samples were behind the cut; the estimate from the sizes of the whole shards is seven.
    assert manifest.problems == {"truncated_archive": 2, "unread_sample": 7, "duplicated_key": 3, "empty_archive": 1}
    kept = [key for number in range(5) for key in read_index(manifest, number).column("key").to_pylist()]
    assert kept == [f"{key:09d}" for key in [*range(100, 110), *range(2000, 2003), *range(110, 115)]]
    with pytest.raises(
        TooManyProblemsError,
        match=r"13 of 31 records .*cc are unreadable \(41\.94%\), more than data\.max_bad_share = 1\.00%.*00003\.tar",
    ):
        prepare(shards, tmp_path / "prepared", max_bad_share=0.01)


def test_preparing_again_is_free_and_an_interrupted_one_goes_on(shards: Path, tmp_path: Path) -> None:
    first = prepare(shards, tmp_path)
    directory = Path(first.directory)
    times = {path.name: path.stat().st_mtime_ns for path in directory.iterdir()}
    assert prepare(shards, tmp_path) == first
    assert times == {path.name: path.stat().st_mtime_ns for path in directory.iterdir()}
    (directory / "manifest.json").unlink()
    (directory / "archive-00003.json").unlink()
    again = prepare(shards, tmp_path)
    assert (again, again.digest) == (first, first.digest)
    rewritten = {"index-00003.arrow", "index-00003.arrow.losses.jsonl", "assembly.losses.jsonl"}
    changed = {path.name for path in directory.iterdir() if times[path.name] != path.stat().st_mtime_ns}
    assert changed == {"manifest.json", "archive-00003.json", *rewritten}
    # Other content is prepared in another directory.
    (shards / "00004.tar").write_bytes(shard(range(500, 503)))
    other = prepare(shards, tmp_path)
    assert other.directory != first.directory
    assert other.num_pairs == first.num_pairs + 3


def test_tars_in_parts_give_the_same_data_and_an_interrupted_preparation_goes_on_with_the_parts_that_are_left(
    shards: Path, tmp_path: Path
) -> None:
    whole = prepare(shards, tmp_path / "whole")
    parts = prepare(shards, tmp_path / "parts", part_bytes=1500)
    directory = Path(parts.directory)
    assert dataclasses.replace(parts, directory=whole.directory) == whole
    for name in [f"index-{number:05d}.arrow" for number in range(5)]:
        for file in (name, f"{name}.losses.jsonl"):
            assert (directory / file).read_bytes() == (Path(whole.directory) / file).read_bytes()
    # The job is killed while the first tar is indexed, and goes on with other units in mind.
    names = sorted(path.name for path in directory.glob("part-00000-*.json"))
    assert len(names) > 2
    for name in ("manifest.json", "archive-00000.json", "index-00000.arrow", names[0], names[-1]):
        (directory / name).unlink()
    times = {path.name: path.stat().st_mtime_ns for path in directory.iterdir()}
    assert prepare(shards, tmp_path / "parts", part_bytes=10**9) == parts
    changed = {path.name for path in directory.glob("*.json") if times.get(path.name) != path.stat().st_mtime_ns}
    assert changed == {"manifest.json", "archive-00000.json", names[0], names[-1]}
