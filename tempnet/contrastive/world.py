"""The ranks that share a batch, and the collective operations that the losses need, which are not part of any graph.

Autograd never sees a collective operation: every rank computes the whole gradient of its own part in the forward
pass, so that the order of communication cannot depend on the order in which autograd visits nodes.

Shapes: W ranks, b rows on each rank (the same number on all), B = W·b rows in total.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True)
class World:
    """A process among W ranks; `World.alone()` works without torch.distributed."""

    rank: int
    """Rank of this process, from 0."""
    size: int
    """Number W of ranks."""
    group: dist.ProcessGroup | None = None
    """Process group of the ranks; None stands for the default group if size > 1."""

    @classmethod
    def alone(cls) -> World:
        """Return the world of a single process."""
        return cls(0, 1)

    @classmethod
    def current(cls, group: dist.ProcessGroup | None = None) -> World:
        """Return the world of the given or the default process group, or of one process if none is initialised."""
        if not (dist.is_available() and dist.is_initialized()):
            return cls.alone()
        return cls(dist.get_rank(group), dist.get_world_size(group), group)

    def part(self, num_rows: int) -> slice:
        """Return the part of `num_rows` = B rows, in the order of ranks, that belongs to this rank."""
        num_local = num_rows // self.size
        return slice(self.rank * num_local, (self.rank + 1) * num_local)

    def gather(self, x: Tensor) -> Tensor:
        """Concatenate the (b, …) of all ranks to (B, …), in the order of ranks; every rank receives the result."""
        x = x.detach().contiguous()
        if self.size == 1:
            return x
        gathered = x.new_empty(self.size * len(x), *x.shape[1:])
        dist.all_gather_single(gathered, x, group=self.group)
        return gathered

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum over the ranks, on every rank; −inf and NaN are preserved. `x` may be overwritten."""
        x = x.detach().contiguous()
        if self.size > 1:
            dist.all_reduce(x, group=self.group)
        return x

    def sum_part(self, x: Tensor) -> Tensor:
        """Sum the (B, …) of all ranks, and return this rank's part (b, …) of the sum."""
        if self.size == 1:
            return x
        reduced = x.new_empty(len(x) // self.size, *x.shape[1:])
        dist.reduce_scatter_single(reduced, x.contiguous(), group=self.group)
        return reduced

    def barrier(self) -> None:
        """Wait until all ranks have called this method."""
        if self.size > 1:
            dist.barrier(self.group)
