"""Test what the tasks share: paths, the size of the node's cache, and the record of the text of training."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from jobs.engine.hardware import GIB
from jobs.tasks.base import cache_bytes, feature_cache
from jobs.tasks.language_model.data import (
    TRAINING_TEXT_FILE,
    read_training_text,
    warn_of_known_text,
    write_training_text,
)
from pipelines.archives import list_archives
from pipelines.features import Column, FeatureFiles
from pipelines.plan import StreamPlan


@dataclass
class Data:
    cache_gib: float
    shuffle_window: int = 200


def size(data: Data, *, num_shards: int = 6, shard: int = GIB, split: str = "train") -> int:
    plan = StreamPlan(shard_sizes=(100,) * num_shards, seed=3, window_size=data.shuffle_window)
    return cache_bytes(data, plan=plan, shard_bytes=[shard] * num_shards, split=split)


def test_a_cache_that_holds_a_window_is_used(capsys: pytest.CaptureFixture[str]) -> None:
    assert size(Data(cache_gib=2)) == 2 * GIB
    assert size(Data(cache_gib=3, shuffle_window=1000), num_shards=3) == 3 * GIB
    assert size(Data(cache_gib=0)) == size(Data(cache_gib=0.1), shard=0) == 0
    assert not capsys.readouterr().out
    plan = StreamPlan(shard_sizes=(10, 10, 10, 10, 10), seed=0, window_size=10)
    assert [plan.cache_need([1, 2, 3, 4, largest]) for largest in (50, 5)] == [50, 5]


def test_a_cache_that_is_too_small_is_reported_and_not_used(capsys: pytest.CaptureFixture[str]) -> None:
    assert size(Data(cache_gib=1.9), split="") == 0
    assert not capsys.readouterr().out
    assert size(Data(cache_gib=1.9)) == 0
    said = capsys.readouterr().out
    assert said.startswith("warning: data.cache_gib = 1.9 is less than the 2 GiB that the largest window of data.train")
    # A cache of the size that it names is used.
    assert size(Data(cache_gib=1e-12), shard=GIB // 3 + 1) == 0
    (named,) = re.findall(r"set data.cache_gib to (\S+) or more", capsys.readouterr().out)
    assert size(Data(cache_gib=float(named)), shard=GIB // 3 + 1) >= 2 * (GIB // 3 + 1)


def test_stored_features_in_an_object_store_are_measured_against_the_cache(capsys: pytest.CaptureFixture[str]) -> None:
    def cache_of(directory: str) -> int:
        columns = (Column(name="embedding", dtype=np.uint8, shape=(GIB // 200,)),)
        kinds = [
            FeatureFiles(
                directory=directory, name=name, noun=name, shard_sizes=(100,) * 6, columns=columns, rows_per_file=9
            )
            for name in ("images", "captions")
        ]
        pairs = SimpleNamespace(plan=partial(StreamPlan, shard_sizes=(100,) * 6))
        config = SimpleNamespace(run=SimpleNamespace(seed=3), data=Data(cache_gib=1.9))
        return feature_cache(config, pairs, kinds, split="train")

    assert cache_of("/features") == 0
    assert not capsys.readouterr().out
    assert cache_of("s3://bucket/features?region=eu-west-1") == 0
    assert "data.cache_gib = 1.9 is less than the 2 GiB" in capsys.readouterr().out


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Write three archives: of training, held out with the same name, and held out with another name."""
    for name, content in (("a/0.jsonl", "train"), ("b/0.jsonl", "held out"), ("c/1.jsonl", "train")):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(f'{{"text": "{content}"}}\n')
    return tmp_path


def known(model: Path, text: Path) -> list[str]:
    return warn_of_known_text(str(model), str(text), list_archives(str(text)), field="data.train")


def test_only_the_same_archive_is_known(texts: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = texts / "model"
    model.mkdir()
    assert known(model, texts / "a") == []  # Nothing is recorded.
    write_training_text(model, str(texts / "a"), "", loss="ce")
    assert known(model, texts / "b") == known(model, texts / "c") == []
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        assert known(model, texts / "a") == known(model, texts / "a" / "0.jsonl") == ["0.jsonl"]
    assert f"data.train = {texts / 'a'} holds text that {model} was trained on (0.jsonl)" in caplog.text


def test_an_export_remembers_the_text_of_the_model_it_began_with(texts: Path) -> None:
    first, frozen, tuned = (texts / name for name in ("first", "frozen", "tuned"))
    for directory in (first, frozen, tuned):
        directory.mkdir()
    write_training_text(first, str(texts / "a"), "", loss="dro")
    write_training_text(frozen, str(texts / "b"), str(first), loss="")
    assert read_training_text(str(frozen)) == read_training_text(str(first)) != (set(), "")
    write_training_text(tuned, str(texts / "b"), str(first), loss="ce")
    assert [read_training_text(str(model))[1] for model in (first, frozen, tuned)] == ["dro", "dro", "ce"]
    assert known(tuned, texts / "a") == known(tuned, texts / "b") == ["0.jsonl"]


def test_a_frozen_base_of_unknown_origin_gets_no_record(texts: Path) -> None:
    model = texts / "model"
    model.mkdir()
    write_training_text(model, str(texts / "a"), str(texts), loss="")
    assert not (model / TRAINING_TEXT_FILE).exists()
