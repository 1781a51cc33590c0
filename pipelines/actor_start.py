"""The first call of a Ray actor, which must not depend on Ray's message that the actor lives.

A call of an actor's method is sent when the caller knows that the actor is alive. With the first call the caller asks
Ray for the actor's state and subscribes to its changes. Where the actor is still being created, the call depends on one
message, the change from pending to alive, and such messages were seen to stay away for good: the actor was
up and idle, and the caller waited for ever. A first call that is made when Ray's table has the actor as alive is sent by
the answer to the question alone. An actor that is killed and created again by Ray is not covered.
"""

from __future__ import annotations

import time
from typing import Any

import ray
from ray._private import state
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

_SECONDS_BETWEEN_LOOKS = 0.05


def on_this_node() -> NodeAffinitySchedulingStrategy:
    """Return the scheduling strategy that keeps an actor on the caller's node, so that it is not lost with another one."""
    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)


def has_started(actor: Any) -> bool:
    """Return whether the creation of an actor is over: it is alive, or dead, and then the next call raises Ray's error.

    Args:
        actor: handle of an actor of which this process has called no method.
    """
    return state.actors(actor._actor_id.hex()).get("State") in ("ALIVE", "DEAD")


def wait_until_started(actor: Any) -> None:
    """Wait until :func:`has_started`; without limit, since CPUs may have to become free and packages be installed."""
    while not has_started(actor):
        time.sleep(_SECONDS_BETWEEN_LOOKS)
