"""The start of a run's controller, which does not depend on Ray's message that the controller lives.

A call of an actor's method is sent when the caller knows that the actor is alive. With the first call the caller asks
Ray for the actor's state and subscribes to its changes. Twice the change from pending to alive did not arrive
(docs/log.md): the controller was up and idle, but the driver, which had asked it to run, waited for ever. Here the first
call is made when Ray's table has the controller as alive, so that there is no change to be missed. Should a controller
still not answer, it is replaced.
"""

from __future__ import annotations

import time
from typing import Any

import ray
from ray._private import state

from jobs.engine.job import FatalTrainingError

NUM_STARTS = 3
_PATIENCE_SECONDS = 60.0
_SECONDS_BETWEEN_LOOKS = 0.05


class SilentControllerError(FatalTrainingError):
    """A controller does not answer, although Ray's table has it as alive; it ends the run if others do not either."""


def wait_for_answer(controller: Any, *, patience_seconds: float = _PATIENCE_SECONDS) -> None:
    """Wait until a run's controller answers or is dead; a dead one makes the next call of it raise Ray's own error.

    One that is still being started is waited for without limit, since packages may have to be installed for it.

    Args:
        controller: handle of Ray Train's controller, of which no method has been called.
        patience_seconds: seconds for which it may be alive without an answer.

    Raises:
        SilentControllerError: if it is alive and does not answer; it is ended.
    """
    while state.actors(controller._actor_id.hex()).get("State") not in ("ALIVE", "DEAD"):
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    answered, _ = ray.wait([controller.get_state.remote()], timeout=patience_seconds)
    if not answered:
        ray.kill(controller)
        raise SilentControllerError(
            f"Ray started the controller of this run, but it has not answered for {patience_seconds:g} s"
        )
