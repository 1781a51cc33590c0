"""The start of a run's controller: it gets its first call when it lives, and is replaced if it does not answer.

Why the first call waits: see `pipelines.actor_start`. Twice a controller was up and idle while the driver, which had asked
it to run, waited for ever.
"""

from __future__ import annotations

from typing import Any

import ray

from jobs.engine.job import FatalTrainingError
from pipelines.actor_start import wait_until_started

NUM_STARTS = 3
_PATIENCE_SECONDS = 60.0


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
    wait_until_started(controller)
    answered, _ = ray.wait([controller.get_state.remote()], timeout=patience_seconds)
    if not answered:
        ray.kill(controller)
        raise SilentControllerError(
            f"Ray started the controller of this run, but it has not answered for {patience_seconds:g} s"
        )
