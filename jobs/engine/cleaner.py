"""Ray Train's cleaner of placement groups, made to ask its own cluster.

A detached actor beside every run asks Ray's state API once a second whether the run's controller is alive, and if it is not,
frees what the run has reserved. It does not say which cluster: where several Rays run on one machine, the one that was
started last is asked, which knows of no such controller, and a healthy run is ended as soon as somebody starts another Ray.

Imports no torch: the cleaner has a process of its own, for which that would be half of its start.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import ray
from ray.train.v2._internal.callbacks import placement_group_callback
from ray.train.v2._internal.execution.controller.placement_group_cleaner import PlacementGroupCleaner


class OwnClusterCleaner(PlacementGroupCleaner):
    """Runs in a process of its own, in which $RAY_ADDRESS is what the state API goes by."""

    def __init__(self, **settings: Any) -> None:
        os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
        super().__init__(**settings)


class OwnClusterCleanerCallback(placement_group_callback.PlacementGroupCleanerCallback):
    """Runs in the run's controller, and starts the cleaner there."""

    def after_controller_start(self, train_run_context: Any) -> None:
        """See Ray's."""
        placement_group_callback.PlacementGroupCleaner = OwnClusterCleaner  # type: ignore[misc, assignment]
        super().after_controller_start(train_run_context)


def ask_own_cluster(callbacks: Iterable[Any]) -> list[Any]:
    """The callbacks of a controller, with this cleaner in the place of Ray's."""
    theirs = placement_group_callback.PlacementGroupCleanerCallback
    return [OwnClusterCleanerCallback() if type(one) is theirs else one for one in callbacks]
