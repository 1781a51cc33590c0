"""A subclass of Ray Train's placement group cleaner that queries the cluster it runs in.

Ray Train starts a detached actor for every run, the cleaner, which asks Ray's state API once a second whether the run's
controller is alive, and frees the run's reserved resources if it is not. The original does not specify which cluster it
asks. If several Ray clusters run on one machine, it asks the one started last, which does not know the controller, so a
healthy run is ended as soon as somebody starts another Ray cluster on the machine.

This module does not import torch: the cleaner has its own process, whose startup time the import would double.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import ray
from ray.train.v2._internal.callbacks import placement_group_callback
from ray.train.v2._internal.execution.controller.placement_group_cleaner import PlacementGroupCleaner


class OwnClusterCleaner(PlacementGroupCleaner):
    """Runs in its own process, where it sets $RAY_ADDRESS, by which Ray's state API finds the cluster."""

    def __init__(self, **settings: Any) -> None:
        os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
        super().__init__(**settings)


class OwnClusterCleanerCallback(placement_group_callback.PlacementGroupCleanerCallback):
    """Runs in the controller of a run and starts the cleaner from there."""

    def after_controller_start(self, train_run_context: Any) -> None:
        """Start an `OwnClusterCleaner` instead of Ray's cleaner; see Ray's method."""
        placement_group_callback.PlacementGroupCleaner = OwnClusterCleaner  # type: ignore[misc, assignment]
        super().after_controller_start(train_run_context)


def ask_own_cluster(callbacks: Iterable[Any]) -> list[Any]:
    """Return the controller's callbacks with Ray's cleaner callback replaced by `OwnClusterCleanerCallback`."""
    theirs = placement_group_callback.PlacementGroupCleanerCallback
    return [OwnClusterCleanerCallback() if type(callback) is theirs else callback for callback in callbacks]
