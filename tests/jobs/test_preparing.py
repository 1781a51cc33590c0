"""The jobs that make sample data and prepare images: parts are made once, losses are printed, bad values refused."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from image_archive_support import jpeg
from text_archive_support import tar

from jobs import sample_data
from jobs.prepare_images import main
from jobs.sample_data import SampleDataConfig, make_sample_data
from pipelines.images.manifest import ImageManifest
from pipelines.sample.images import write_images
from pipelines.text.tokenization import load_tokenizer


def make(directory: Path, *parts: sample_data.Part, num_images: int = 60) -> str:
    return make_sample_data(
        SampleDataConfig(
            directory=str(directory), parts=parts, num_bytes=1_000_000, num_images=num_images, image_size=32
        )
    )


def test_parts_are_made_once_and_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_data, "_NUM_TOKENIZER_CHARACTERS", 100_000)
    few = partial(write_images, num_retrieval_images=20, num_classes=2, num_images_per_class=2)
    monkeypatch.setattr(sample_data, "write_images", few)
    assert make(tmp_path, "images").startswith(f"{tmp_path}/images: 60 training pairs")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["images", "sample.json"]
    times = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert make(tmp_path, "images") == f"{tmp_path}/images is there already"
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == times
    first, second = make(tmp_path, "text", "images").splitlines()
    assert "training documents" in first
    assert second == f"{tmp_path}/images is there already"
    assert load_tokenizer(str(tmp_path / "tokenizer")).eos_token is not None
    assert (tmp_path / "images" / "tokenizer" / "tokenizer.json").is_file()
    record = json.loads((tmp_path / "sample.json").read_text())
    assert sorted(record) == ["images", "text"]
    assert record["images"]["config"] == {"num_images": 60, "image_size": 32, "images_seed": 0}
    assert record["images"]["summary"]["num_images_test"] == 20
    with pytest.raises(FileExistsError, match="images"):
        make(tmp_path, "images", num_images=61)
    # A record that was written before a field existed stands for the field's default.
    del record["images"]["config"]["images_seed"]
    (tmp_path / "sample.json").write_text(json.dumps(record))
    assert make(tmp_path, "images") == f"{tmp_path}/images is there already"


def test_values_are_checked(tmp_path: Path) -> None:
    for field, value in (("parts", ()), ("num_images", 0), ("image_size", 16), ("num_bytes", 1), ("vocab_size", 10)):
        with pytest.raises(ValueError, match=field):
            SampleDataConfig(directory=str(tmp_path), **{field: value})


def test_the_job_prints_counts_problems_and_digest_and_refuses_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], refusal: Callable[..., str]
) -> None:
    monkeypatch.setattr("jobs.engine.cluster.start_ray", lambda: None)
    source, storage, listed = str(tmp_path / "cc"), ["--storage", str(tmp_path / "runs")], tmp_path / "losses.jsonl"
    (tmp_path / "cc").mkdir()
    keys = [f"{key:09d}" for key in range(10)]
    content = tar((f"{key}.{form}", data) for key in keys for form, data in (("jpg", jpeg()), ("txt", b"caption")))
    (tmp_path / "cc" / "0.tar").write_bytes(content)
    (tmp_path / "cc" / "1.tar").write_bytes(content[: content.index(b"000000003.jpg") + 612])
    (tmp_path / "cc" / "2.tar").write_bytes(tar([]))
    assert main(["--source", source, "--max-bad-share", "0.9", "--problems", str(listed), *storage]) == 0
    kinds: Counter[str] = Counter()
    for loss in map(json.loads, listed.read_text().splitlines()):
        kinds[loss["kind"]] += loss["count"]
    printed = capsys.readouterr().out
    manifest = ImageManifest.load(printed.splitlines()[0])
    assert kinds == manifest.problems
    assert f"13 pairs of 13 images (3 shards, digest {manifest.digest})" in printed
    assert "unreadable: 1 empty_archive, 1 truncated_archive, " in printed
    assert "1.tar (truncated_archive: corrupt tar: it ends within 000000003.jpg)" in printed
    (tmp_path / "captions.json").write_text("{}")
    for options, message in {
        ("--captions", str(tmp_path / "captions.json")): "is not understood",
        (): "more than max_bad_share = 1.00%",
        ("--splits", "test"): "captions, which is empty",
        ("--max-pixels", "0"): "max_pixels = 0",
    }.items():
        assert message in refusal("prepare_images", "--source", source, *options, *storage)
