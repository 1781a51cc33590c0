"""A snapshot of Ray Train that it would not start from is forgotten, which is why `jobs.engine.ray_private` does so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ray.train import CheckpointConfig
from ray.train.v2._internal.exceptions import CheckpointManagerInitializationError
from ray.train.v2._internal.execution.checkpoint.checkpoint_manager import CheckpointManager
from ray.train.v2._internal.execution.storage import StorageContext

from jobs.engine.ray_private import forget_snapshot


@pytest.mark.parametrize("change", [{"ray_version": "2.1", "current_report_index": "many"}, {}])
def test_ray_train_does_not_start_from_a_snapshot_of_another_version_or_without_a_checkpoint(
    tmp_path: Path, change: dict[str, str]
) -> None:
    def open_manager() -> CheckpointManager:
        storage = StorageContext(storage_path=str(tmp_path), experiment_dir_name="run")
        return CheckpointManager(CheckpointConfig(), storage)

    state = json.loads(open_manager()._save_state())
    gone = {"checkpoint_dir_name": "checkpoint-00000005", "metrics": {}}
    state |= {"checkpoint_results": [gone], "checkpoint_report_indices": [0], "latest_checkpoint_result": gone}
    (tmp_path / "run" / "checkpoint_manager_snapshot.json").write_text(json.dumps(state | change))
    with pytest.raises(CheckpointManagerInitializationError):
        open_manager()
    forget_snapshot(str(tmp_path / "run"))
    assert open_manager().latest_checkpoint_result is None
