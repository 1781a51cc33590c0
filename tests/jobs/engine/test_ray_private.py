"""What `jobs.engine.ray_private` works around is still so; a test that fails names a part that can go."""

from __future__ import annotations

import inspect
import json
import os
from pathlib import Path

import psutil
import pytest
import ray
import ray.train
import ray.util.state
import torch.distributed as dist
from ray.train import CheckpointConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from ray.train.v2._internal.exceptions import CheckpointManagerInitializationError
from ray.train.v2._internal.execution.checkpoint.checkpoint_manager import CheckpointManager
from ray.train.v2._internal.execution.storage import StorageContext
from ray.train.v2._internal.execution.train_fn_utils import DistributedTrainFnUtils

from jobs.engine.ray_private import forget_snapshot


def test_ray_has_no_public_name_for_what_is_taken_from_it() -> None:
    for where in (TorchTrainer, RunConfig, ScalingConfig):
        assert not [name for name in inspect.signature(where).parameters if "policy" in name or "cleaner" in name]
    assert not [name for name in dir(ray.train) if "Policy" in name]
    assert not [name for name in (*dir(ray), *dir(ray.util.state)) if "resources_per_node" in name]
    assert not [name for name in inspect.signature(TorchConfig).parameters if "address" in name or "host" in name]
    assert "listen" not in str(inspect.signature(ray.init))
    # The public question is one that all workers ask together.
    assert "broadcast_from_rank_zero" in inspect.getsource(DistributedTrainFnUtils.get_preemption_info)


def test_the_store_of_pytorch_listens_everywhere() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    listening = [place for place in psutil.Process(os.getpid()).net_connections("tcp") if place.status == "LISTEN"]
    (place,) = [place.laddr for place in listening if place.laddr.port == store.port]
    assert place.ip in ("::", "0.0.0.0")


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
