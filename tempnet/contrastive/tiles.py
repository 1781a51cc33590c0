"""Compute the similarities of a batch one tile at a time, for both directions (image → text and back), in two passes.

A rank computes S = f(e_I e_Tᵀ) of its own images with all texts. Row i compares the image anchor i with the texts,
and column j is this rank's part of the comparison of the text anchor j with the images. f is the identity, or
2·artanh for the temperature-free loss.

    pass 1    m_i = max_{j∈N(i)} S_ij and log Σ_{j∈N(i)} exp((S_ij − m_i)/τ_i) of every row, and likewise of every column
              over this rank's rows
    pass 2    the weights exp((S_ij − m_i)/τ_i − o_i), where the offsets o_i follow from pass 1. The weights of rows and
              columns are added and multiplied by f′, and give the gradients of the embeddings. If τ is learned, the
              pass also computes Σ_j weight_ij·(S_ij − m_i)

At τ = .001 the numbers S/τ reach a thousand, and the gradient in τ is a difference of such numbers. The largest
similarity is therefore subtracted before anything is divided by τ or summed, and the two are kept apart until the end.

Both passes serve K losses at a time, which differ in their temperatures. Each tile is computed again in the second pass
instead of being stored, which takes 4 matrix products instead of 3, and memory O(tile²). The positives' own contribution
to the gradient is added in `step`, where it has a closed form.

The entries that are not negatives (the diagonal, captions of one image, an id that was drawn twice) are few, so they are
stored as a list, which is found by sorting, and never as a matrix.

Shapes: K losses, B pairs in the global batch, b pairs (rows) on this rank, P listed entries, d dimensions of an
embedding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

# Similarity of entries that are not negatives: finite, so that 0 · S is 0, and so low that exp(S/τ − c) is exactly 0.
_NO_NEGATIVE = -1e9
# exp is computed as exp2, with log₂e in the scale, because on a CPU torch's exp takes ten times as long where results
# underflow, as most do at small τ.
_LOG2_E = math.log2(math.e)
# On a CPU a tile and its buffers should fit in the cache (measured: sizes 256 … 1024 are within 10 %). A GPU needs
# larger tiles to be fully used.
_TILE_SIZE_CPU, _TILE_SIZE_GPU = 512, 4096
# Minimum distance of cosines from ±1, where artanh is infinite (arXiv 2501.17683).
_COSINE_MARGIN = 1e-6


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
        """Find the entries, given the image ids (B,) of the global batch and the part of it that belongs to this rank."""
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


class LogSums(NamedTuple):
    """log Σ exp(S/τ) over the negatives of n anchors in two parts: it is m/τ + rest."""

    top: Tensor
    """m, the largest similarity: (n,)."""
    rest: Tensor
    """log Σ exp((S − m)/τ): (K, n)."""

    def relative_to(self, positives: Tensor, scale: Tensor) -> Tensor:
        """Return ℓ = log Σ exp((S − positive)/τ) (K, n) for positives (n,) and scale = 1/τ (K, n)."""
        return (self.top - positives) * scale + self.rest


class Weighting(NamedTuple):
    """The weights exp((S − top)·scale − offset) of n anchors' negatives."""

    scale: Tensor
    """1/τ: (K, n)."""
    top: Tensor
    """m, the largest similarity of the negatives: (n,)."""
    offset: Tensor
    """o, +inf for an anchor without weight: (K, n)."""


class _Tile(NamedTuple):
    """Location of a tile, and four buffers (rows, columns), which are reused for the next tile.

    `logits` are f of the cosines, and _NO_NEGATIVE at entries that are not negatives; `spare` holds the cosines if f is
    2·artanh.
    """

    rows: slice
    columns: slice
    logits: Tensor
    row_work: Tensor
    column_work: Tensor
    spare: Tensor


class SimilarityTiles:
    """The two passes over the similarities S, of this rank's images (b, d) with all texts (B, d).

    `pairs` are the entries that are not negatives; `is_artanh` says whether f is 2·artanh. Memory holds four buffers of
    tile_size² numbers; None: a size that suits the device.
    """

    def __init__(
        self, image: Tensor, text: Tensor, pairs: PositivePairs, *, tile_size: int | None, is_artanh: bool = False
    ) -> None:
        tile_size = tile_size or (_TILE_SIZE_CPU if image.device.type == "cpu" else _TILE_SIZE_GPU)
        self.image, self.text, self.tile_size, self.is_artanh = image, text, tile_size, is_artanh
        self.positives = pairs.by_tile(tile_size)
        self.buffers = image.new_empty(4, min(tile_size, len(image)) * min(tile_size, len(text)))

    def logsumexp(self, row_scale: Tensor, column_scale: Tensor) -> tuple[LogSums, LogSums]:
        """Pass 1: return log Σ exp(S·scale) over the negatives of every row and column, for 1/τ (K, b) and (K, B).

        The sums of the columns are only over this rank's rows.
        """
        row_sums, column_sums = (
            LogSums(torch.full_like(scale[0], -torch.inf), torch.full_like(scale, -torch.inf))
            for scale in (row_scale, column_scale)
        )
        for tile in self._tiles():
            for dim, part, scales, sums, work in (
                (1, tile.rows, row_scale, row_sums, tile.row_work),
                (0, tile.columns, column_scale, column_sums, tile.column_work),
            ):
                top, before = tile.logits.amax(dim), sums.top[part]
                now = torch.maximum(top, before)
                for scale, rest in zip(scales[:, part], sums.rest[:, part], strict=True):
                    weights = torch.sub(tile.logits, top.unsqueeze(dim), out=work)
                    log_sum = weights.mul_((scale * _LOG2_E).unsqueeze(dim)).exp2_().sum(dim).log_()
                    rest.copy_(torch.logaddexp(rest + (before - now) * scale, log_sum + (top - now) * scale))
                before.copy_(now)
        return row_sums, column_sums

    def gradients(
        self, rows: Weighting, columns: Weighting, *, with_image: bool, with_text: bool, with_products: bool
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """Pass 2: return the gradients for the weights of the rows (K, b) and of the columns (K, B), None if not requested.

        They are those of this rank's images (K, b, d) and of all texts (K, B, d), and the products Σ_j weight_ij·(S_ij − m_i)
        of the rows (K, b) and Σ_i weight_ij·(S_ij − m_j) of the columns (K, B). Texts and columns have only the contribution
        of this rank's rows.
        """
        assert not (self.is_artanh and with_products), "a loss without a temperature has no gradient in it"
        count = len(rows.scale)
        image_grad = self.image.new_zeros(count, *self.image.shape) if with_image else None
        text_grad = self.text.new_zeros(count, *self.text.shape) if with_text else None
        row_products = torch.zeros_like(rows.scale) if with_products else None
        column_products = torch.zeros_like(columns.scale) if with_products else None
        for tile in self._tiles():
            slopes = artanh_slope(tile.spare) if self.is_artanh else None
            for number in range(count):
                for dim, part, own, products, work in (
                    (1, tile.rows, rows, row_products, tile.row_work),
                    (0, tile.columns, columns, column_products, tile.column_work),
                ):
                    top = own.top[part].unsqueeze(dim)
                    scale, offset = ((_LOG2_E * x[number, part]).unsqueeze(dim) for x in (own.scale, own.offset))
                    torch.sub(tile.logits, top, out=work)
                    torch.addcmul(-offset, work, scale, out=work).exp2_()
                    if products is not None:
                        products[number, part] += torch.sub(tile.logits, top, out=tile.spare).mul_(work).sum(dim)
                weights = tile.row_work.add_(tile.column_work)
                if slopes is not None:
                    weights.mul_(slopes)
                if image_grad is not None:
                    image_grad[number, tile.rows].addmm_(weights, self.text[tile.columns])
                if text_grad is not None:
                    text_grad[number, tile.columns].addmm_(weights.T, self.image[tile.rows])
        return image_grad, text_grad, row_products, column_products

    def sigmoid(
        self, scale: Tensor, offset: Tensor, *, with_image: bool, with_text: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        """Sum the sigmoid loss over the negatives of every row in a single pass, x = S·scale − offset with both (b,).

        Returned are Σ softplus(x), Σ σ(x) and Σ σ(x)·S, (b,) each, and the gradients of the first in this rank's
        images (b, d) and in all texts (B, d; only the contribution of this rank's rows), None if not requested.
        """
        losses, weight_sums, products = (torch.zeros_like(scale) for _ in range(3))
        image_grad = torch.zeros_like(self.image) if with_image else None
        text_grad = torch.zeros_like(self.text) if with_text else None
        for tile in self._tiles():
            own = scale[tile.rows, None]
            torch.addcmul(-offset[tile.rows, None], tile.logits, own, out=tile.row_work)
            zero = torch.zeros_like(offset[:1])
            losses[tile.rows] += torch.logaddexp(tile.row_work, zero, out=tile.column_work).sum(1)
            weights = tile.row_work.sigmoid_()
            weight_sums[tile.rows] += weights.sum(1)
            products[tile.rows] += torch.mul(weights, tile.logits, out=tile.column_work).sum(1)
            weights.mul_(own)
            if image_grad is not None:
                image_grad[tile.rows].addmm_(weights, self.text[tile.columns])
            if text_grad is not None:
                text_grad[tile.columns].addmm_(weights.T, self.image[tile.rows])
        return losses, weight_sums, products, image_grad, text_grad

    def _tiles(self) -> Iterator[_Tile]:
        size = self.tile_size
        for row in range(0, len(self.image), size):
            rows = slice(row, min(row + size, len(self.image)))
            for column in range(0, len(self.text), size):
                columns = slice(column, min(column + size, len(self.text)))
                shape = rows.stop - rows.start, columns.stop - columns.start
                buffers = [buffer[: shape[0] * shape[1]].view(shape) for buffer in self.buffers]
                tile = _Tile(rows, columns, *buffers)
                if self.is_artanh:
                    torch.mm(self.image[rows], self.text[columns].T, out=tile.spare)
                    torch.mul(clamp_cosines(tile.spare).atanh(), 2.0, out=tile.logits)
                else:
                    torch.mm(self.image[rows], self.text[columns].T, out=tile.logits)
                if (positives := self.positives.get((row // size, column // size))) is not None:
                    tile.logits[positives] = _NO_NEGATIVE
                yield tile


def clamp_cosines(cosines: Tensor) -> Tensor:
    """Clamp cosines to ±(1 − 1e-6)."""
    return cosines.clamp(-1.0 + _COSINE_MARGIN, 1.0 - _COSINE_MARGIN)


def artanh_slope(cosines: Tensor) -> Tensor:
    """Return the derivative of 2·artanh(clamp(s)): 2/(1 − s²), and 0 where s is clamped."""
    inside = cosines.abs() < 1.0 - _COSINE_MARGIN
    return torch.where(inside, 2.0 / ((1.0 - cosines) * (1.0 + cosines)), 0.0)
