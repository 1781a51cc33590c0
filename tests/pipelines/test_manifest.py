"""Manifests of prepared text and images: what is written is read again, and another kind or version is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipelines.images.manifest import ImageManifest
from pipelines.manifest import MANIFEST_FILE
from pipelines.text.documents import DocumentConfig
from pipelines.text.manifest import Manifest


def save_text(directory: Path) -> Manifest:
    """Write the manifest of a text without archives."""
    layout = DocumentConfig(least_num_tokens=4, vocab_size=50)
    manifest = Manifest(directory=str(directory), tokenizer_digest="abc", layout=layout, archives=[])
    manifest.save()
    return manifest


def save_images(directory: Path) -> ImageManifest:
    """Write the manifest of images without archives."""
    manifest = ImageManifest(directory=str(directory), source="data", max_pixels=100, shards=[], captions=None)
    manifest.save()
    return manifest


def test_a_saved_manifest_is_read_again(tmp_path: Path) -> None:
    assert save_text(tmp_path) == Manifest.load(str(tmp_path))
    assert save_images(tmp_path) == ImageManifest.load(str(tmp_path))


def test_a_directory_without_a_manifest_is_not_prepared(tmp_path: Path) -> None:
    for kind in (Manifest, ImageManifest):
        with pytest.raises(FileNotFoundError, match=r"it is not a \(completely\) prepared data set"):
            kind.load(str(tmp_path))


def test_a_manifest_of_the_other_kind_is_refused(tmp_path: Path) -> None:
    save_text(tmp_path)
    with pytest.raises(ValueError, match=r"does not hold prepared images of version 3.*: prepare it again"):
        ImageManifest.load(str(tmp_path))
    save_images(tmp_path)
    with pytest.raises(ValueError, match=r"does not hold prepared text of version 4.*: prepare it again"):
        Manifest.load(str(tmp_path))


def test_a_manifest_of_another_version_is_refused(tmp_path: Path) -> None:
    save_text(tmp_path)
    file = tmp_path / MANIFEST_FILE
    file.write_text(json.dumps(json.loads(file.read_text()) | {"version": 2}))
    with pytest.raises(ValueError, match="does not hold prepared text of version 4"):
        Manifest.load(str(tmp_path))
