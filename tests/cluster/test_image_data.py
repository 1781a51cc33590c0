"""Test the preparation of image–text pairs with Ray Data: what is kept, what is counted, and what is continued."""

from __future__ import annotations

import dataclasses
import io
import json
import shutil
import tarfile
from collections import Counter
from pathlib import Path

import pytest
from image_archive_support import jpeg

from jobs.prepare_images import main
from pipelines.images.manifest import ImageManifest, read_index
from pipelines.images.prepare import PrepareImagesConfig, prepare_images
from pipelines.problems import TooManyProblemsError

pytestmark = pytest.mark.cluster


def write_shard(path: Path, keys: range) -> None:
    """Write one tar as img2dataset writes it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as file:
        for key in keys:
            for suffix, data in (("jpg", jpeg(key, (32, 24))), ("txt", f"caption {key}".encode()), ("json", b"{}")):
                info = tarfile.TarInfo(f"{key:09d}.{suffix}")
                info.size = len(data)
                file.addfile(info, io.BytesIO(data))


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Write five shards with gaps between their keys, and return their directory.

    The first shard is whole, the second is cut in its fourth sample, the third is not a tar, the fourth repeats three
    keys of the first, and the fifth is empty.
    """
    directory = tmp_path / "cc"
    write_shard(directory / "00000.tar", range(100, 110))
    write_shard(directory / "00001.tar", range(2000, 2010))
    cut = directory / "00001.tar"
    with tarfile.open(cut) as file:
        cut.write_bytes(cut.read_bytes()[: file.getmember("000002003.jpg").offset_data + 100])
    (directory / "00002.tar").write_bytes(b"\xff" * 2000)
    write_shard(directory / "00003.tar", range(107, 115))
    write_shard(directory / "00004.tar", range(0))
    (directory / "00000_stats.json").write_text("{}")
    return directory


def prepare(source: Path, root: Path, max_bad_share: float = 0.5) -> ImageManifest:
    config = PrepareImagesConfig(source=str(source), max_bad_share=max_bad_share)
    return prepare_images(config, str(root), max_bad_share_field="data.max_bad_share")


def test_bad_shards_cost_what_they_lack_and_the_share_is_held(
    cluster: dict[str, str], shards: Path, tmp_path: Path
) -> None:
    manifest = prepare(shards, tmp_path / "prepared")
    assert manifest.shard_sizes == (10, 3, 0, 5, 0)
    # Six more samples were behind the cut; the estimate from the sizes of the whole shards is seven.
    assert manifest.problems == {"truncated_archive": 2, "unread_sample": 7, "duplicated_key": 3, "empty_archive": 1}
    kept = [key for number in range(5) for key in read_index(manifest, number).column("key").to_pylist()]
    assert kept == [f"{key:09d}" for key in [*range(100, 110), *range(2000, 2003), *range(110, 115)]]
    # A stricter configuration refuses the same data with an error that names share, kinds and archives.
    with pytest.raises(
        TooManyProblemsError,
        match=r"13 of 31 records .*cc are unreadable \(41\.94%\), more than data\.max_bad_share = 1\.00%.*00003\.tar",
    ):
        prepare(shards, tmp_path / "prepared", max_bad_share=0.01)


def test_preparing_again_is_free_and_an_interrupted_one_goes_on(
    cluster: dict[str, str], shards: Path, tmp_path: Path
) -> None:
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
    write_shard(shards / "00004.tar", range(500, 503))
    other = prepare(shards, tmp_path)
    assert other.directory != first.directory
    assert other.num_pairs == first.num_pairs + 3


def test_tars_in_parts_give_the_same_data_and_an_interrupted_preparation_goes_on_with_the_parts_that_are_left(
    cluster: dict[str, str], shards: Path, tmp_path: Path
) -> None:
    config = PrepareImagesConfig(source=str(shards), max_bad_share=0.5)
    whole = prepare_images(config, str(tmp_path / "whole"))
    directory = tmp_path / "parts" / Path(whole.directory).name
    for part_bytes in (1500, 4000):
        parts = prepare_images(config, str(tmp_path / "parts"), part_bytes=part_bytes)
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
        again = prepare_images(config, str(tmp_path / "parts"), part_bytes=10**9)
        assert again == parts
        changed = {path.name for path in directory.glob("*.json") if times.get(path.name) != path.stat().st_mtime_ns}
        assert changed == {"manifest.json", "archive-00000.json", names[0], names[-1]}
        shutil.rmtree(directory)


def test_the_job_prints_counts_problems_and_digest_and_refuses_in_one_line(
    cluster: dict[str, str], shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    storage = ["--storage", str(tmp_path / "runs")]
    listed = tmp_path / "losses.jsonl"
    assert main(["--source", str(shards), "--max-bad-share", "0.5", "--problems", str(listed), *storage]) == 0
    kinds: Counter[str] = Counter()
    for loss in map(json.loads, listed.read_text().splitlines()):
        kinds[loss["kind"]] += loss["count"]
    printed = capsys.readouterr().out
    manifest = ImageManifest.load(printed.splitlines()[0])
    assert kinds == manifest.problems
    assert f"18 pairs of 18 images (5 shards, digest {manifest.digest})" in printed
    assert "unreadable: 3 duplicated_key, 1 empty_archive, 2 truncated_archive, 7 unread_sample" in printed
    assert "00001.tar (truncated_archive: corrupt tar: it ends within 000002003.jpg)" in printed
    for arguments, message in {
        ("--source", str(tmp_path / "nowhere")): "nowhere",
        ("--source", str(shards), "--captions", str(shards / "00000_stats.json")): "is not understood",
        ("--source", str(shards)): "more than max_bad_share = 1.00%",
        ("--source", str(shards), "--splits", "test"): "captions, which is empty",
        ("--source", str(shards), "--max-pixels", "0"): "max_pixels = 0",
    }.items():
        with pytest.raises(SystemExit) as caught:
            main([*arguments, *storage])
        assert caught.value.code == 2
        error = capsys.readouterr().err
        assert message in error
