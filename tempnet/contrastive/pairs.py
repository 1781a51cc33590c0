"""Find the (row, column) entries of a batch that are not negatives: those whose two pairs have the same image.

They are few (the diagonal, captions of one image, an id that was drawn twice), so they are stored as a list, which is
found by sorting, and never as a matrix.

Shapes: B pairs in the global batch, b pairs (rows) on this rank, P listed entries.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PositivePairs:
    """Entries (row, column) of this rank's rows that are not negatives, in the order of the rows."""

    rows: Tensor
    """Row of every entry, numbered on this rank: (P,)."""
    columns: Tensor
    """Column of every entry, numbered in the global batch: (P,)."""
    num_negatives: Tensor
    """Number of negatives of every anchor, equal for an image and its text since the relation is symmetric: (B,)."""

    @classmethod
    def find(cls, image_ids: Tensor, part: slice) -> PositivePairs:
        """Find the entries.

        Args:
            image_ids: (B,) image ids of the global batch.
            part: the part of the global batch that belongs to this rank.
        """
        keys, order = image_ids.sort(stable=True)
        first = torch.searchsorted(keys, image_ids)
        num_same = torch.searchsorted(keys, image_ids, right=True) - first
        local_first, local_same = first[part], num_same[part]
        rows = torch.arange(len(local_same), device=keys.device).repeat_interleave(local_same)
        # `within` counts 0 … num_same − 1 within each row.
        starts = local_same.cumsum(0) - local_same
        within = torch.arange(len(rows), device=keys.device) - starts[rows]
        return cls(rows, order[local_first[rows] + within], len(image_ids) - num_same)

    def by_tile(self, tile_size: int) -> dict[tuple[int, int], tuple[Tensor, Tensor]]:
        """Group the entries by tile: (tile row, tile column) → (rows, columns) of the entries relative to the tile."""
        num_across = -(-len(self.num_negatives) // tile_size)
        keys, order = (self.rows // tile_size * num_across + self.columns // tile_size).sort()
        tiles, counts = torch.unique_consecutive(keys, return_counts=True)
        sizes = counts.tolist()
        rows, columns = ((x % tile_size)[order].split(sizes) for x in (self.rows, self.columns))
        names = [divmod(tile, num_across) for tile in tiles.tolist()]
        return dict(zip(names, zip(rows, columns, strict=True), strict=True))
