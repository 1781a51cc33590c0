"""A subclass of Ray Train's placement group cleaner that asks the control service of its own cluster.

Ray Train starts a detached actor for every run, the cleaner, which asks Ray's state API once a second whether the run's
controller is alive, and frees the run's reserved resources if it is not. The state API is part of the dashboard: without a
dashboard the original asks in vain for ever, so that every lost run leaves a process. It also does not specify which cluster
it asks. If several Ray clusters run on one machine, it asks the one started last, which does not know the controller, so a
healthy run is ended as soon as somebody starts another Ray cluster on the machine. The control service, to which the
cleaner's process is connected anyway, knows every actor of its cluster and no other.

This module does not import torch: the cleaner has its own process, whose startup time the import would double.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ray._private import state
from ray.train.v2._internal.callbacks import placement_group_callback
from ray.train.v2._internal.execution.controller import placement_group_cleaner
from ray.util.state.exception import RayStateApiException


def is_actor_alive(actor_id: str, timeout: int) -> bool:
    """Return whether this process's cluster has an actor that is not dead; in the place of Ray Train's function.

    Raises:
        RayStateApiException: if the control service does not answer, after which the cleaner asks again.
    """
    try:
        actor = state.actors(actor_id)
    except Exception as error:  # Ray raises no more specific exception
        raise RayStateApiException(f"the control service does not answer: {error}") from error
    return bool(actor) and actor["State"] != "DEAD"


class OwnClusterCleaner(placement_group_cleaner.PlacementGroupCleaner):
    """Runs in its own process, in which it replaces Ray Train's question to the state API."""

    def __init__(self, **settings: Any) -> None:
        placement_group_cleaner.is_actor_alive = is_actor_alive
        super().__init__(**settings)
        # A controller that is ended before it has called `start_monitoring` would leave a cleaner that watches nobody.
        self.start_monitoring()


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
