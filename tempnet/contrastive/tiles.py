"""The similarities of a batch, a tile at a time and for both directions at once, in two passes.

Rank r computes S = f(e_I e_Tᵀ) of its own images with all texts: row i is the image anchor i against the texts, column j a
part of the text anchor j against the images. f is the identity, or 2·artanh for the temperature-free loss.

    pass 1    log Σ_{j∈N(i)} exp(S_ij/τ_i) of every row, and of every column over this rank's rows
    pass 2    the weights exp((S_ij − s_i)/τ_i) with s_i known by then, those of rows and columns added, times f′, and from
              them the gradients of the embeddings; where τ is learned, also Σ_j weight_ij·S_ij

The tile is computed again in the second pass instead of being kept: 4 matrix products instead of 3, and memory O(tile²).
The positives' own share of the gradient is not here: it is known in closed form once the sums are (`step`).

Shapes: B global batch, b local rows, d embedding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tempnet.contrastive.pairs import PositivePairs

# Stands for "no negative": finite, so that 0 · S stays 0, and far enough that exp(S/τ − c) is exactly 0.
_NO_NEGATIVE = -1e9
# exp2 with log₂e in the scale: torch's exp takes ten times as long on a CPU where results underflow, as most do at small τ.
_LOG2_E = math.log2(math.e)
# On a CPU a tile and its buffers should stay in the cache (measured: 256 … 1024 are within 10 %); a GPU must be kept busy.
_TILE_SIZE_CPU, _TILE_SIZE_GPU = 512, 4096
# Cosines are kept this far from ±1, where artanh is infinite (arXiv 2501.17683).
_COSINE_MARGIN = 1e-6


@dataclass(frozen=True, slots=True)
class TileGradients:
    """What the second pass yields; None where it was not asked for."""

    image: Tensor | None
    """(b, d), complete."""
    text: Tensor | None
    """(B, d), this rank's rows' share."""
    row_products: Tensor | None
    """(b,) Σ_j weight_ij·S_ij, complete."""
    column_products: Tensor | None
    """(B,) likewise of the columns, this rank's rows' share."""


@dataclass(frozen=True, slots=True)
class _Tile:
    """Where it lies, and four buffers (rows, columns) that are used again for the next one."""

    rows: slice
    columns: slice
    logits: Tensor
    """f of the cosines, _NO_NEGATIVE at pairs that are none."""
    row_work: Tensor
    column_work: Tensor
    spare: Tensor
    """Free, or the cosines where f is 2·artanh."""


class SimilarityTiles:
    """The two passes over S.

    Args:
        image: (b, d) this rank's rows.
        text: (B, d) all rows.
        pairs: which entries are no negatives.
        tile_size: at most tile_size² entries exist at a time, four times over; None: by the device.
        is_artanh: f is 2·artanh.
    """

    def __init__(
        self, image: Tensor, text: Tensor, pairs: PositivePairs, *, tile_size: int | None, is_artanh: bool = False
    ) -> None:
        tile_size = tile_size or (_TILE_SIZE_CPU if image.device.type == "cpu" else _TILE_SIZE_GPU)
        self.image, self.text, self.tile_size, self.is_artanh = image, text, tile_size, is_artanh
        self.positives = pairs.by_tile(tile_size)
        self.buffers = image.new_empty(4, min(tile_size, len(image)) * min(tile_size, len(text)))

    def logsumexp(self, row_scale: Tensor, column_scale: Tensor) -> tuple[Tensor, Tensor]:
        """Pass 1: log Σ exp(S·scale) over the negatives of every row (b,) and, of this rank's rows, of every column (B,).

        Args:
            row_scale: (b,) 1/τ of the image anchors.
            column_scale: (B,) 1/τ of the text anchors.
        """
        row_sums = torch.full_like(row_scale, -torch.inf)
        column_sums = torch.full_like(column_scale, -torch.inf)
        for tile in self._tiles():
            for dim, part, scale, sums, work in (
                (1, tile.rows, row_scale, row_sums, tile.row_work),
                (0, tile.columns, column_scale, column_sums, tile.column_work),
            ):
                top, part_scale = tile.logits.amax(dim, keepdim=True), scale[part].unsqueeze(dim)
                weights = torch.sub(tile.logits, top, out=work).mul_(part_scale * _LOG2_E).exp2_()
                log_sum = weights.sum(dim).log_() + (top * part_scale).squeeze(dim)
                sums[part] = torch.logaddexp(sums[part], log_sum)
        return row_sums, column_sums

    def gradients(
        self,
        row_scale: Tensor,
        column_scale: Tensor,
        row_shift: Tensor,
        column_shift: Tensor,
        *,
        with_image: bool,
        with_text: bool,
        with_products: bool,
    ) -> TileGradients:
        """Pass 2, with weights exp((S − shift)·scale) of the rows and of the columns.

        Args:
            row_scale, row_shift: (b,); a shift of +inf switches an anchor off.
            column_scale, column_shift: (B,).
            with_image, with_text, with_products: what is wanted.
        """
        assert not (self.is_artanh and with_products), "a loss without a temperature has no gradient in it"
        image_grad = torch.zeros_like(self.image) if with_image else None
        text_grad = torch.zeros_like(self.text) if with_text else None
        row_products = torch.zeros_like(row_scale) if with_products else None
        column_products = torch.zeros_like(column_scale) if with_products else None
        for tile in self._tiles():
            rows, columns, logits = tile.rows, tile.columns, tile.logits
            row_weights = torch.sub(logits, row_shift[rows, None], out=tile.row_work)
            row_weights.mul_(row_scale[rows, None] * _LOG2_E).exp2_()
            column_weights = torch.sub(logits, column_shift[columns], out=tile.column_work)
            column_weights.mul_(column_scale[columns] * _LOG2_E).exp2_()
            if row_products is not None and column_products is not None:
                row_products[rows] += torch.mul(row_weights, logits, out=tile.spare).sum(1)
                column_products[columns] += logits.mul_(column_weights).sum(0)
            weights = row_weights.add_(column_weights)
            if self.is_artanh:
                weights.mul_(artanh_slope(tile.spare))
            if image_grad is not None:
                image_grad[rows].addmm_(weights, self.text[columns])
            if text_grad is not None:
                text_grad[columns].addmm_(weights.T, self.image[rows])
        return TileGradients(image_grad, text_grad, row_products, column_products)

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
    """Within ±(1 − 1e-6)."""
    return cosines.clamp(-1.0 + _COSINE_MARGIN, 1.0 - _COSINE_MARGIN)


def artanh_slope(cosines: Tensor) -> Tensor:
    """The derivative of 2·artanh(clamp(s)): 2/(1 − s²), and 0 where it is clamped."""
    inside = cosines.abs() < 1.0 - _COSINE_MARGIN
    return torch.where(inside, 2.0 / ((1.0 - cosines) * (1.0 + cosines)), 0.0)
