"""Test that the cleaner of a run asks the Ray that the run is in, even if other Rays are on the machine."""

from __future__ import annotations

import os
from typing import Any

import pytest
import ray
from ray.train.torch import TorchTrainer
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
from ray.train.v2._internal.state.util import is_actor_alive

from jobs.engine.cleaner import OwnClusterCleaner, OwnClusterCleanerCallback
from jobs.engine.trainer import Trainer

pytestmark = pytest.mark.cluster


def test_it_asks_its_own_cluster(cluster: dict[str, str]) -> None:
    class Asking(OwnClusterCleaner):
        def address(self) -> str:
            return os.environ["RAY_ADDRESS"]

        def is_alive(self, actor_id: str) -> bool:
            return bool(is_actor_alive(actor_id, timeout=60))

    # The cleaner is given the address of another Ray, as Ray's state API would find it once another Ray was started.
    cleaner: Any = (
        ray.remote(num_cpus=0)(Asking)
        .options(runtime_env={"env_vars": {"RAY_ADDRESS": "127.0.0.1:1"}})
        .remote(controller_actor_id="", check_interval_s=1.0, get_actor_timeout_s=60, stop_timeout=None)
    )
    assert ray.get(cleaner.address.remote()) == ray.get_runtime_context().gcs_address
    assert ray.get(cleaner.is_alive.remote(cleaner._actor_id.hex()))
    ray.kill(cleaner)


def test_every_run_has_it_in_the_place_of_rays(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, other = PlacementGroupCleanerCallback(), object()
    monkeypatch.setattr(TorchTrainer, "_create_default_callbacks", lambda self: [other, theirs])
    first, second = object.__new__(Trainer)._create_default_callbacks()
    assert first is other
    assert type(second) is OwnClusterCleanerCallback
