"""The start of a trial's actor, which Tune calls only when it lives.

Tune calls the actor of a trial as soon as it has asked Ray to create it, and so depends on Ray's message that the actor
lives. Ray's stream of messages to a driver was seen to end for good in mid-job, after which Tune waited for ever for an
actor that was up and idle (`pipelines.actor_start` says what helps). Creating the actor waits until it lives
here: some seconds, in which the other trials go on, but what they report is taken afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ray.air.execution import PlacementGroupResourceManager
from ray.air.execution.resources.placement_group import PlacementGroupAcquiredResources

from pipelines.actor_start import wait_until_started


class _StartedActors:
    """Remote class whose new actors live, or are dead, when they are returned."""

    def __init__(self, remote_class: Any) -> None:
        self._remote_class = remote_class

    def remote(self, *arguments: Any, **options: Any) -> Any:
        actor = self._remote_class.remote(*arguments, **options)
        wait_until_started(actor)
        return actor


class _Resources(PlacementGroupAcquiredResources):
    """Resources of a trial's actor, with which Tune creates it."""

    def annotate_remote_entities(self, entities: list[Any]) -> list[Any]:
        return [_StartedActors(entity) for entity in super().annotate_remote_entities(entities)]


@contextmanager
def calling_trials_that_live() -> Iterator[None]:
    """Let Tune, inside the block, call actors only when they live."""
    usual = PlacementGroupResourceManager._resource_cls
    PlacementGroupResourceManager._resource_cls = _Resources  # type: ignore[assignment]  # Ray's annotation lacks "type"
    try:
        yield
    finally:
        PlacementGroupResourceManager._resource_cls = usual
