"""Test that the cleaner of a run frees what a lost run had reserved, and ends, also in a Ray without a dashboard."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import ray
from ray._private import state
from ray.train.torch import TorchTrainer
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
from ray.util.placement_group import placement_group, placement_group_table
from support import ROOT, wait_for

from jobs.engine.cleaner import OwnClusterCleaner, OwnClusterCleanerCallback
from jobs.engine.cluster import start_ray
from jobs.engine.trainer import Trainer

pytestmark = pytest.mark.cluster


class Run:
    """A controller that does nothing, one reserved CPU, and the cleaner, which watches the controller.

    The cleaner is given the address of another Ray, as Ray's state API would find it once another Ray was started.
    """

    def __init__(self) -> None:
        class Controller:
            def answer(self) -> bool:
                return True

        self.controller: Any = ray.remote(num_cpus=0)(Controller).remote()
        self.reserved = placement_group([{"CPU": 1}])
        ray.get([self.controller.answer.remote(), self.reserved.ready()])
        options: dict[str, Any] = {"lifetime": "detached", "runtime_env": {"env_vars": {"RAY_ADDRESS": "127.0.0.1:1"}}}
        self.cleaner: Any = (
            ray.remote(num_cpus=0)(OwnClusterCleaner)
            .options(**options)
            .remote(
                controller_actor_id=self.controller._actor_id.hex(), check_interval_s=0.1, get_actor_timeout_s=5,
                stop_timeout=10.0,
            )
        )  # fmt: skip
        ray.get([self.cleaner.register_placement_group.remote(self.reserved), self.cleaner.start_monitoring.remote()])

    def has_cleaner(self) -> bool:
        return bool(state.actors(self.cleaner._actor_id.hex())["State"] != "DEAD")

    def has_resources(self) -> bool:
        return bool(placement_group_table(self.reserved)["state"] == "CREATED")


def lose_a_run() -> None:
    """Assert that the cleaner leaves a healthy run alone, and that it frees the resources of a lost one and ends."""
    start_ray()
    run = Run()
    with suppress(TimeoutError):
        wait_for(lambda: not (run.has_cleaner() and run.has_resources()), seconds=2)
    assert run.has_cleaner()
    assert run.has_resources()
    ray.kill(run.controller)
    wait_for(lambda: not run.has_resources())
    wait_for(lambda: not run.has_cleaner())


def test_it_frees_what_a_lost_run_had_reserved_and_ends() -> None:
    """In a Ray that a process of its own starts, which has no dashboard."""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    environment["PYTHONPATH"] = f"{Path(__file__).parent}{os.pathsep}{ROOT}"
    command = [sys.executable, "-c", "import test_cleaner; test_cleaner.lose_a_run()"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("cluster")
def test_it_ends_with_its_run_and_frees_nothing() -> None:
    """A run frees its resources itself when it ends."""
    run = Run()
    with suppress(ray.exceptions.RayActorError):  # the actor may end before the answer of its last call
        ray.get(run.cleaner.stop.remote(), timeout=30)
    wait_for(lambda: not run.has_cleaner())
    assert run.has_resources()
    ray.util.remove_placement_group(run.reserved)


def test_every_run_has_it_in_the_place_of_rays(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, other = PlacementGroupCleanerCallback(), object()
    monkeypatch.setattr(TorchTrainer, "_create_default_callbacks", lambda self: [other, theirs])
    first, second = object.__new__(Trainer)._create_default_callbacks()
    assert first is other
    assert type(second) is OwnClusterCleanerCallback
