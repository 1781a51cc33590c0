"""What preparation records: manifests that are read again or refused, and every lost image, listed and counted."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from image_archive_support import prepare

from pipelines.images.manifest import ImageManifest
from pipelines.problems import list_lost
from pipelines.storage import MANIFEST_FILE
from pipelines.text.manifest import Manifest
from pipelines.text.packing import DocumentConfig


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


def test_every_lost_image_is_listed_and_what_only_all_archives_together_show(tmp_path: Path) -> None:
    source, prepared = tmp_path / "images", tmp_path / "prepared"
    source.mkdir()
    for number in range(20):
        (source / f"{number}.jpg").write_bytes(b"no image")
    named = [{"image": f"{number}.jpg", "caption": "c"} for number in range(30)]
    (tmp_path / "captions.json").write_text(json.dumps(named))
    manifest = prepare(source, prepared, str(tmp_path / "captions.json"))
    list_lost(str(prepared), manifest.lost_files, str(tmp_path / "all.jsonl"))
    losses = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()]
    assert {(loss["kind"], loss["where"]) for loss in losses} == {
        ("corrupt_image" if number < 20 else "absent_image", f"{number}.jpg") for number in range(30)
    }
    assert Counter(loss["kind"] for loss in losses) == manifest.problems
