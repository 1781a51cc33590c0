"""The start of a run's controller, which is repeated if Ray does not tell this process that the controller lives.

A call of an actor's method is sent when Ray has told the caller that the actor is alive. Twice that message did not come
(docs/log.md): the controller was up and idle, but the driver, which had asked it to run, waited for ever.
"""

from __future__ import annotations

import time
from typing import Any

import ray
from ray._private import state

# A controller that is alive answers within milliseconds; on two cores under full load, within a few seconds.
PATIENCE_SECONDS = 60.0
NUM_STARTS = 3


class SilentControllerError(RuntimeError):
    """Raised if a controller does not answer, although Ray's own table has it as alive."""


def wait_for_answer(controller: Any, *, patience_seconds: float = PATIENCE_SECONDS) -> None:
    """Wait until a run's controller answers or is dead; a dead one makes the next call of it raise Ray's own error.

    A controller that is still being started is waited for without limit, since that may take minutes, if packages
    have to be installed first.

    Args:
        controller: handle of Ray Train's controller.
        patience_seconds: seconds for which it may be alive without an answer.

    Raises:
        SilentControllerError: if it is alive and does not answer; it is ended.
    """
    answer = controller.get_state.remote()
    alive_since: float | None = None
    while not ray.wait([answer], timeout=1)[0]:
        if state.actors(controller._actor_id.hex()).get("State") != "ALIVE":
            alive_since = None
        elif alive_since is None:
            alive_since = time.monotonic()
        elif time.monotonic() - alive_since > patience_seconds:
            ray.kill(controller)
            raise SilentControllerError(
                f"Ray started the controller of this run, but it has not answered for {patience_seconds:g} s"
            )
