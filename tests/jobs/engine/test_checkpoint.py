"""Tests which objects are read from DeepSpeed's checkpoint files, on every Python, and that all others are refused."""

from __future__ import annotations

import pickle
import pickletools
from pathlib import Path

import pytest
import torch
from deepspeed.runtime.zero.config import ZeroStageEnum

from jobs.engine.checkpoint import SafeCheckpointEngine


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
