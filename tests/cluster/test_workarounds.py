"""Test what is done about a fault of Ray: the cleaner of a run."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import ray
from ray._private import state
from ray.train.v2._internal.execution.controller.placement_group_cleaner import PlacementGroupCleaner
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from support import wait_for

from jobs.engine.ray_private import OwnClusterCleaner

pytestmark = [pytest.mark.cluster, pytest.mark.long]


@pytest.mark.parametrize("kind", [OwnClusterCleaner, PlacementGroupCleaner])
def test_a_cleaner_that_is_told_of_another_cluster_leaves_a_healthy_run_alone_and_frees_a_lost_one(
    cluster: dict[str, str], kind: type
) -> None:
    """The run is a controller that does nothing, and one reserved CPU, which Ray's own cleaner keeps; else ours could go."""

    class Controller:
        def answer(self) -> bool:
            return True

    controller: Any = ray.remote(num_cpus=0)(Controller).remote()
    reserved = placement_group([{"CPU": 1}])
    ray.get([controller.answer.remote(), reserved.ready()])
    # Ray's state API would ask the cluster of this address, as it does once another Ray was started on the machine.
    options: dict[str, Any] = {"lifetime": "detached", "runtime_env": {"env_vars": {"RAY_ADDRESS": "127.0.0.1:1"}}}
    settings = {"check_interval_s": 0.1, "get_actor_timeout_s": 5, "stop_timeout": 10.0}
    cleaner: Any = (
        ray.remote(num_cpus=0)(kind)
        .options(**options)
        .remote(controller_actor_id=controller._actor_id.hex(), **settings)
    )
    ray.get([cleaner.register_placement_group.remote(reserved), cleaner.start_monitoring.remote()])

    def lives() -> tuple[bool, bool]:
        """Return whether the cleaner lives, and whether the CPU is reserved."""
        has_cleaner = state.actors(cleaner._actor_id.hex())["State"] != "DEAD"
        return has_cleaner, placement_group_table(reserved)["state"] == "CREATED"

    with suppress(TimeoutError):
        wait_for(lambda: lives() != (True, True), seconds=2)
    assert lives() == (True, True)
    ray.kill(controller)
    if kind is OwnClusterCleaner:
        wait_for(lambda: lives() == (False, False))
        return
    with suppress(TimeoutError):
        wait_for(lambda: lives() != (True, True), seconds=10)
    assert lives() == (True, True)
    ray.kill(cleaner)
    remove_placement_group(reserved)
