"""The job that prepares images prints what it found and what is lost, and refuses in one line."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from image_archive_support import jpeg
from text_archive_support import tar

from jobs.prepare_images import main
from pipelines.images.manifest import ImageManifest


def test_the_job_prints_counts_problems_and_digest_and_refuses_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
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
        with pytest.raises(SystemExit) as caught:
            main(["--source", source, *options, *storage])
        assert caught.value.code == 2
        said = capsys.readouterr().err
        assert message in said
        assert said.count("\n") == 1
