"""Which pairs of a batch are no negatives of each other: those with the same image, hence also the same id.

They are few (the diagonal, captions of one image, an id drawn twice), so they are a list, found by sorting, never a matrix.

Shapes: B global batch, b local rows, P listed pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PositivePairs:
    """The pairs of this rank's rows with all columns that are no negatives, in the order of the rows."""

    rows: Tensor
    """(P,) local rows."""
    columns: Tensor
    """(P,) global columns."""
    num_negatives: Tensor
    """(B,) of every anchor; the relation is symmetric, so of an image as of its text."""

    @classmethod
    def find(cls, image_ids: Tensor, part: slice) -> PositivePairs:
        """From the image ids (B,) of the global batch and the part of it that is this rank's."""
        keys, order = image_ids.sort(stable=True)
        first = torch.searchsorted(keys, image_ids)
        num_same = torch.searchsorted(keys, image_ids, right=True) - first
        local_first, local_same = first[part], num_same[part]
        rows = torch.arange(len(local_same), device=keys.device).repeat_interleave(local_same)
        # Counts 0 … num_same − 1 within each row.
        starts = local_same.cumsum(0) - local_same
        within = torch.arange(len(rows), device=keys.device) - starts[rows]
        return cls(rows, order[local_first[rows] + within], len(image_ids) - num_same)

    def by_tile(self, tile_size: int) -> dict[tuple[int, int], tuple[Tensor, Tensor]]:
        """(tile row, tile column) → the pairs inside that tile, in its own coordinates."""
        num_across = -(-len(self.num_negatives) // tile_size)
        keys, order = (self.rows // tile_size * num_across + self.columns // tile_size).sort()
        tiles, counts = torch.unique_consecutive(keys, return_counts=True)
        sizes = counts.tolist()
        rows, columns = ((x % tile_size)[order].split(sizes) for x in (self.rows, self.columns))
        names = [divmod(tile, num_across) for tile in tiles.tolist()]
        return dict(zip(names, zip(rows, columns, strict=True), strict=True))
