"""Tests which objects are read from DeepSpeed's checkpoint files, on every Python, and that all others are refused."""

from __future__ import annotations

import json
import os
import pickle
import pickletools
import signal
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from deepspeed.runtime.zero.config import ZeroStageEnum

from jobs.engine.checkpoint import FRESH_STATE, SafeCheckpointEngine, _process_directory, read_state, upload_part
from jobs.engine.config import RunSection, TrainingConfig
from jobs.engine.failures import FatalTrainingError

CONFIG = TrainingConfig(run=RunSection(name="run"))


def test_a_stage_is_pickled_by_its_value_whatever_the_python(tmp_path: Path) -> None:
    stage = ZeroStageEnum(2)
    names = [argument for _, argument, _ in pickletools.genops(pickle.dumps(stage)) if isinstance(argument, str)]
    assert "getattr" not in names
    torch.save({"zero_stage": stage, "weight": torch.ones(2)}, tmp_path / "states.pt")
    found = SafeCheckpointEngine().load(str(tmp_path / "states.pt"))
    assert found["zero_stage"] is stage
    assert torch.equal(found["weight"], torch.ones(2))


def test_anything_else_is_refused(tmp_path: Path) -> None:
    torch.save({"hidden": pytest.raises}, tmp_path / "states.pt")
    with pytest.raises(pickle.UnpicklingError):
        SafeCheckpointEngine().load(str(tmp_path / "states.pt"))


def test_a_checkpoint_of_a_program_with_another_order_of_the_data_is_refused(tmp_path: Path) -> None:
    """A checkpoint without a version is one that was written before there were several."""
    state = asdict(FRESH_STATE)
    del state["order_version"]
    (tmp_path / "state.json").write_text(json.dumps(state))
    assert read_state(tmp_path, CONFIG, order_version=1) == FRESH_STATE
    (tmp_path / "state.json").write_text(
        json.dumps(state | {"step": 40, "store_retries": {"s3": {"503": 2, "cut": 1}}})
    )
    assert read_state(tmp_path, CONFIG, order_version=1).store_retries == 3  # as earlier versions counted
    with pytest.raises(FatalTrainingError, match=r"another order \(version 1; this program has version 2\)"):
        read_state(tmp_path, CONFIG, order_version=2)


def test_what_concerns_another_run_alone_is_not_taken_over(tmp_path: Path) -> None:
    state = replace(
        FRESH_STATE, step=40, world_size=1, num_units=7, best_rating=0.5, unsent_metrics=[["loss", 1.0]],
        validations=[(40, {"loss": 2.0})], store_retries=2, batches_digest="0123",
    )  # fmt: skip
    (tmp_path / "state.json").write_text(json.dumps(asdict(state)))
    own = read_state(tmp_path, CONFIG, order_version=1)
    assert (own.best_rating, own.unsent_metrics, own.store_retries) == (0.5, [["loss", 1.0]], 2)
    config = replace(CONFIG, run=replace(CONFIG.run, start_from="other@40"))
    started = read_state(tmp_path, config, order_version=1)
    assert started == replace(own, best_rating=None, unsent_metrics=[], store_retries=0, batches_digest="")


def test_a_part_that_cannot_be_uploaded_leaves_no_copy(tmp_path: Path) -> None:
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "state.json").write_text("{}")
    (tmp_path / "run").write_text("a file in the place of the run's directory")
    with pytest.raises(OSError, match="run"):
        upload_part(tmp_path / "part", str(tmp_path / "run" / "checkpoint-00000005"), rank=0, world_size=1, group="")
    assert not (tmp_path / "part").exists()


def test_what_a_killed_process_has_left_is_deleted_by_the_next_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    pids = []
    for number in range(2):
        if not (pid := os.fork()):
            directory = _process_directory.__wrapped__()
            (directory / "part").write_bytes(bytes(1000))
            (tmp_path / f"ready-{number}").touch()
            time.sleep(60)
            os._exit(0)
        pids.append(pid)
        while not (tmp_path / f"ready-{number}").exists():
            time.sleep(0.01)
    try:
        before = sorted(tmp_path.glob("tempnet-checkpoints-*"))
        assert len(before) == 2
        os.kill(pids[0], signal.SIGKILL)
        os.waitpid(pids[0], 0)
        own = _process_directory.__wrapped__()
        left = set(tmp_path.glob("tempnet-checkpoints-*")) - {own}
        assert len(left) == 1
        assert left < set(before)
    finally:
        os.kill(pids[1], signal.SIGKILL)
        os.waitpid(pids[1], 0)
