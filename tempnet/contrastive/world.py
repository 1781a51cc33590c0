"""The ranks that share a batch, and the three collectives that the losses need, none of them part of a graph.

Autograd never sees a collective: every rank computes the whole gradient of its own part in the forward pass, so the order
of communication cannot depend on the order in which autograd visits nodes.

Shapes: W ranks, b local rows (the same on every rank), B = W·b.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True)
class World:
    """This process among W; `World.alone()` needs no torch.distributed."""

    rank: int
    size: int
    group: dist.ProcessGroup | None = None
    """None with size > 1: the default group."""

    @classmethod
    def alone(cls) -> World:
        """One process."""
        return cls(0, 1)

    @classmethod
    def current(cls, group: dist.ProcessGroup | None = None) -> World:
        """The given group of torch.distributed, or the default one, or one process where none is initialised."""
        if not (dist.is_available() and dist.is_initialized()):
            return cls.alone()
        return cls(dist.get_rank(group), dist.get_world_size(group), group)

    def part(self, num_rows: int) -> slice:
        """Which of B rows in rank order are this rank's."""
        num_local = num_rows // self.size
        return slice(self.rank * num_local, (self.rank + 1) * num_local)

    def gather(self, x: Tensor) -> Tensor:
        """(b, …) of every rank → (B, …) in rank order."""
        x = x.detach().contiguous()
        if self.size == 1:
            return x
        gathered = x.new_empty(self.size * len(x), *x.shape[1:])
        dist.all_gather_single(gathered, x, group=self.group)
        return gathered

    def sum(self, x: Tensor) -> Tensor:
        """The sum over the ranks, on every rank; −inf and NaN survive. `x` may be overwritten."""
        x = x.detach().contiguous()
        if self.size > 1:
            dist.all_reduce(x, group=self.group)
        return x

    def sum_part(self, x: Tensor) -> Tensor:
        """(B, …) on every rank → this rank's (b, …) of the sum over the ranks."""
        if self.size == 1:
            return x
        reduced = x.new_empty(len(x) // self.size, *x.shape[1:])
        dist.reduce_scatter_single(reduced, x.contiguous(), group=self.group)
        return reduced

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.size > 1:
            dist.barrier(self.group)
