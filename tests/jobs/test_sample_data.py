from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from jobs import sample_data
from jobs.sample_data import SampleDataConfig, make_sample_data
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
