"""Tests that the configuration of every preset comes back from the record of its run, and that damage is refused."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jobs.engine.config import TrainingConfig
from jobs.engine.fields import resolve_fields, with_absolute_paths
from jobs.engine.task_record import configuration_from, read_task, write_task
from jobs.tasks.presets import clip, language_models, sentences

PRESETS: dict[str, Callable[[], Any]] = {**clip.PRESETS, **language_models.PRESETS, **sentences.PRESETS}


@pytest.mark.parametrize("name", PRESETS)
def test_a_configuration_comes_back(name: str, tmp_path: Path) -> None:
    config: TrainingConfig = PRESETS[name]()
    config = dataclasses.replace(config, run=dataclasses.replace(config.run, storage=str(tmp_path)))
    Path(config.run.directory).mkdir()
    write_task(config)
    kind, values = read_task(config.run.directory)
    assert kind == type(config).__name__
    assert configuration_from(type(config), values) == with_absolute_paths(resolve_fields(config))


def test_a_password_is_not_recorded(tmp_path: Path) -> None:
    config = language_models.gpt2_scratch()
    tracking = dataclasses.replace(config.tracking, uri="http://user:secret@host")
    config = dataclasses.replace(config, run=dataclasses.replace(config.run, storage=str(tmp_path)), tracking=tracking)
    Path(config.run.directory).mkdir()
    write_task(config)
    assert "secret" not in (tmp_path / "gpt2-scratch" / "task.json").read_text()


def test_what_is_no_record_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="not the directory of a run, or the run is of an older version"):
        read_task(str(tmp_path))
    (tmp_path / "task.json").write_text(json.dumps({"configuration": {}}))
    with pytest.raises(ValueError, match="is damaged"):
        read_task(str(tmp_path))
    with pytest.raises(ValueError, match="has no field color: the run is of another version"):
        configuration_from(TrainingConfig, {"color": 1})
