"""Adds up over all workers the requests to object stores that were repeated, for the log, the metrics and the outcome."""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist

from jobs.engine.console import Progress
from pipelines.retries import RETRIES, Counts, RetryLog, count_all, count_by_reason


class StoreRetries:
    """The repeated requests of a whole run, known on rank 0.

    Args:
        totals: what was counted before the run was restarted.
        group: group of all workers, on the host.
        progress: shows lines to the user; None on other ranks than 0.
    """

    def __init__(
        self,
        totals: Mapping[str, Mapping[str, int]],
        *,
        group: dist.ProcessGroup | None,
        progress: Progress | None,
    ) -> None:
        self._group = group
        self._is_first = progress is not None
        self._log = RetryLog(progress.say if progress else _say_nothing, totals)

    @property
    def totals(self) -> Counts:
        """Number of requests by store and reason, as of the last :meth:`collect`; on rank 0."""
        return self._log.totals

    def collect(self) -> Counts:
        """Add what the readers of all ranks have counted since the last call, and return the totals.

        All ranks must call this; the totals are those of the run on rank 0.
        """
        taken = [""] * dist.get_world_size(self._group) if self._is_first else None
        dist.gather_object(RETRIES.take(), taken, dst=0, group=self._group)
        for text in taken or ():
            self._log.add(text)
        return self.totals

    def metrics(self) -> dict[str, float]:
        """Return the number of all requests, and by reason; nothing if no request was repeated."""
        if not self.totals:
            return {}
        by_reason = {f"store_retries/{reason}": float(count) for reason, count in count_by_reason(self.totals).items()}
        return {"store_retries": float(count_all(self.totals)), **by_reason}


def _say_nothing(_: str) -> None:
    """Do nothing."""
