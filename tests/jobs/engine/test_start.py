"""Tests which checkpoints of other runs a run can start from."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jobs.engine.config import OptimizerSection, RunSection, TrainingConfig
from jobs.engine.identity import configuration_hash
from jobs.engine.launch import claim_directory
from jobs.engine.resumption import checkpoint_name
from jobs.engine.start import check_start, start_checkpoint
from jobs.engine.worker_settings import WorkersSection
from pipelines.storage import write_json


def make_config(tmp_path: Path, name: str, start_from: str = "", **sections: Any) -> TrainingConfig:
    run = RunSection(name=name, storage=str(tmp_path), num_steps=100, start_from=start_from)
    return TrainingConfig(run=run, **sections)


@pytest.fixture
def other(tmp_path: Path) -> TrainingConfig:
    """Returns the configuration of a run with a whole checkpoint of step 40 and a damaged one of step 60."""
    config = make_config(tmp_path, "other")
    claim_directory(config)
    for step, num_bytes in ((40, 2), (60, 3)):
        directory = tmp_path / "other" / checkpoint_name(step)
        directory.mkdir()
        (directory / "weights").write_bytes(b"ab")
        files = {"weights": {"num_bytes": num_bytes, "digest": ""}}
        write_json(str(directory / "files-00000.json"), {"world_size": 1, "group": "", "files": files})
    return config


@pytest.mark.parametrize("start", ["other", "other@", "other@0", "other@x", "@40", "a/b@40", "other@100", "other@101"])
def test_a_start_is_a_run_and_a_step_before_the_last(tmp_path: Path, start: str) -> None:
    with pytest.raises(ValueError, match=rf"run.start_from = '{start}' must be NAME@STEP, .* run.num_steps = 100"):
        make_config(tmp_path, "run", start)


def test_a_run_without_a_start_is_the_run_that_it_was(tmp_path: Path) -> None:
    config = make_config(tmp_path, "run")
    check_start(config)
    assert start_checkpoint(config.run) == ""
    assert config.run.start_step == 0
    assert configuration_hash(config) != configuration_hash(make_config(tmp_path, "run", "other@40"))


def test_decimal_numbers_may_differ(tmp_path: Path, other: TrainingConfig) -> None:
    config = make_config(
        tmp_path, "run", "other@40", optimizer=OptimizerSection(learning_rate_base=1.0, decay="linear")
    )
    check_start(replace(config, run=replace(config.run, num_steps=50)))
    assert start_checkpoint(config.run) == f"{tmp_path}/other/{checkpoint_name(40)}"


@pytest.mark.parametrize(
    ("start", "sections", "message"),
    [
        ("none@40", {}, "there is no run in "),
        (
            "other@41",
            {},
            "checkpoint-00000041 in .*, the directory is missing.*; its whole checkpoints are of the steps 40",
        ),
        ("other@60", {}, "weights has 2 bytes instead of 3; its whole checkpoints are of the steps 40"),
        ("other@40", {"optimizer": OptimizerSection(batch_size=64)}, "optimizer.batch_size: 32 → 64"),
        ("other@40", {"workers": WorkersSection(zero_stage=1)}, "workers.zero_stage: 2 → 1"),
    ],
)
def test_what_cannot_be_continued_is_refused(
    tmp_path: Path, other: TrainingConfig, start: str, sections: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=rf"run.start_from = '{re.escape(start)}': .*{message}"):
        check_start(make_config(tmp_path, "run", start, **sections))


def test_another_seed_has_another_order_of_data(tmp_path: Path, other: TrainingConfig) -> None:
    config = make_config(tmp_path, "run", "other@40")
    with pytest.raises(ValueError, match=r"run\.seed: 0 → 3"):
        check_start(replace(config, run=replace(config.run, seed=3)))
