"""Test that text which a model was trained on is recognised by the record beside its export."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from jobs.tasks.language_model.training_text import (
    TRAINING_TEXT_FILE,
    read_training_text,
    warn_of_known_text,
    write_training_text,
)
from pipelines.archives import list_archives


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
    write_training_text(model, str(texts / "a"), "", is_base_trained=True)
    assert known(model, texts / "b") == known(model, texts / "c") == []
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        assert known(model, texts / "a") == known(model, texts / "a" / "0.jsonl") == ["0.jsonl"]
    assert f"data.train = {texts / 'a'} holds text that {model} was trained on (0.jsonl)" in caplog.text


def test_an_export_remembers_the_text_of_the_model_it_began_with(texts: Path) -> None:
    first, frozen, tuned = (texts / name for name in ("first", "frozen", "tuned"))
    for directory in (first, frozen, tuned):
        directory.mkdir()
    write_training_text(first, str(texts / "a"), "", is_base_trained=True)
    write_training_text(frozen, str(texts / "b"), str(first), is_base_trained=False)
    assert read_training_text(str(frozen)) == read_training_text(str(first)) != set()
    write_training_text(tuned, str(texts / "b"), str(first), is_base_trained=True)
    assert known(tuned, texts / "a") == known(tuned, texts / "b") == ["0.jsonl"]


def test_a_frozen_base_of_unknown_origin_gets_no_record(texts: Path) -> None:
    model = texts / "model"
    model.mkdir()
    write_training_text(model, str(texts / "a"), str(texts), is_base_trained=False)
    assert not (model / TRAINING_TEXT_FILE).exists()
