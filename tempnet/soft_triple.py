"""Losses for fine-tuning classifiers beside cross-entropy: SoftTriple (arXiv 1909.05235) with TripleEntropy, and SupCon.

With unit vectors x and w_c^k, where each of C classes has K centres w_c^1 … w_c^K:

    S'_c = Σ_k softmax_k(xᵀw_c^k / γ) · xᵀw_c^k
    ℓ    = −log softmax(λ·(S' − δ·onehot(y)))_y
    R    = Σ_c Σ_{s<t} √(2 − 2·w_c^s·w_c^t + ε) / (C·K·(K−1))            optional regulariser, merges similar centres
    L    = β·CE + (1 − β)·(ℓ + weight·R)                                   TripleEntropy

ℓ is the mean over all non-padding tokens of a sentence, and CE is the cross-entropy of the pooled sentence. All is computed
in float32 (float64 stays float64). Neither the (n, C, K) similarities nor the (K, K) distances are stored completely: both
are computed one tile at a time, and again in the backward pass.

The supervised contrastive loss (Gunel et al. 2021, arXiv 2011.01403, eqs. 1 and 4) is, with unit vectors x of n sentences,

    ℓ = (1/n) Σ_i −1/|P_i| Σ_{j ∈ P_i} log( exp(x_iᵀx_j/τ) / Σ_{k ≠ i} exp(x_iᵀx_k/τ) )     P_i: others of the class of i
    L = (1 − λ)·CE + λ·ℓ

where a sentence with empty P_i has the term 0. The paper sums over i; the mean keeps λ independent of the batch size.

Shapes: n vectors of dimension d, C classes, K centres per class.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tempnet.contrastive.state import World
from tempnet.dro import at_least_float32
from tempnet.softmax.reference import IGNORE_INDEX

_TILE_VALUES = 1 << 22
_EPSILON = 1e-5  # As in the authors' code; it is needed because the slope of the square root at 0 is infinite.


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftTripleOptions:
    """Settings of the loss without the regulariser; the defaults are the best ones of the paper (Table 1)."""

    num_centers: int = 2000
    """K, the number of centres per class."""
    gamma: float = 0.1
    """γ, the temperature of the softmax over the centres of a class."""
    scale: float = 3.3
    """λ, the scale of the class similarities in the softmax."""
    margin: float = 0.3
    """δ, the margin subtracted from the similarity to the right class."""
    beta: float = 0.9
    """β, the weight of the cross-entropy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftTripleConfig(SoftTripleOptions):
    """Settings of the loss; a field outside its range raises ValueError, which names it."""

    regularizer: float = 0.0
    """Weight of the regulariser R; if 0, R is not computed."""

    def __post_init__(self) -> None:
        if self.num_centers < 1:
            raise ValueError(f"num_centers = {self.num_centers} must be positive")
        for name in ("gamma", "scale"):
            if not (value := getattr(self, name)) > 0.0 or math.isinf(value):
                raise ValueError(f"{name} = {value:g} must be positive and finite")
        for name in ("margin", "regularizer"):
            if not (value := getattr(self, name)) >= 0.0 or math.isinf(value):
                raise ValueError(f"{name} = {value:g} must not be negative, and finite")
        if not 0.0 <= self.beta <= 1.0:
            raise ValueError(f"beta = {self.beta:g} must lie in [0, 1]")


class SoftTriple(nn.Module):
    """Module that computes ℓ + weight·R; its parameter is the tensor of all centres (C, K, d).

    Fewer than two classes raise ValueError.
    """

    def __init__(self, embedding_size: int, num_classes: int, config: SoftTripleConfig) -> None:
        super().__init__()
        if num_classes < 2:
            raise ValueError(f"num_classes = {num_classes}: a classifier needs two classes or more")
        self.config = config
        self.centers = nn.Parameter(torch.empty(num_classes, config.num_centers, embedding_size))
        nn.init.kaiming_uniform_(self.centers.view(-1, embedding_size), a=math.sqrt(5))

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Return ℓ + weight·R, a scalar; see :meth:`token_loss` and :meth:`regularization`."""
        loss = self.token_loss(embeddings, labels)
        return loss + self.regularization() if self.config.regularizer else loss

    def token_loss(self, embeddings: Tensor, labels: Tensor, counted: Tensor | None = None) -> Tensor:
        """Return ℓ, a scalar; it is 0 if every label is ignored.

        The vectors (…, d) are normalised here and must not be 0. The labels (…) are int64 in [0, C), others raise
        ValueError, or -100 for vectors that are not counted, such as those of padding. `counted` (m,) has the positions of
        the others among all vectors in order; with it, nothing is read from the device, and the labels are not checked.
        """
        num_classes = len(self.centers)
        y = labels.flatten()
        if counted is None:
            counted = (y != IGNORE_INDEX).nonzero().squeeze(1)
            wrong = y[counted][(y[counted] < 0) | (y[counted] >= num_classes)]
            if len(wrong):
                raise ValueError(f"label {int(wrong[0])} is not in [0, {num_classes})")
        x, y = embeddings.flatten(0, -2)[counted], y[counted]
        with torch.autocast(embeddings.device.type, enabled=False):
            centers = F.normalize(at_least_float32(self.centers), dim=-1)
            logits = self.config.scale * self._similarities(F.normalize(at_least_float32(x), dim=-1), centers)
            is_own = y[:, None] == torch.arange(num_classes, device=y.device)
            logits = logits - self.config.scale * self.config.margin * is_own.to(logits)
            return F.cross_entropy(logits, y, reduction="sum") / max(1, len(y))

    def regularization(self) -> Tensor:
        """Return weight·R, a scalar; it is 0 if each class has only one centre."""
        with torch.autocast(self.centers.device.type, enabled=False):
            centers = F.normalize(at_least_float32(self.centers), dim=-1)
            return self.config.regularizer * (
                center_regularizer(centers) if self.config.num_centers > 1 else centers.new_zeros(())
            )

    def _similarities(self, x: Tensor, centers: Tensor) -> Tensor:
        rows = max(1, _TILE_VALUES // (centers.shape[0] * centers.shape[1]))
        parts = [
            checkpoint(_soft_similarities, part, centers, self.config.gamma, use_reentrant=False)
            for part in x.split(rows)
        ]
        return torch.cat(parts)


def center_regularizer(centers: Tensor) -> Tensor:
    """Return the regulariser R of unit centres (C, K, d) with K > 1."""
    num_classes, num_centers, _ = centers.shape
    rows = max(1, _TILE_VALUES // num_centers)
    total = centers.new_zeros(())
    for of_class in centers:
        for start in range(0, num_centers, rows):
            total = total + checkpoint(_distances, of_class, start, start + rows, use_reentrant=False)
    return total / (num_classes * num_centers * (num_centers - 1))


def supervised_contrastive_loss(embeddings: Tensor, labels: Tensor, temperature: float, world: World) -> Tensor:
    """Return this rank's 1/W of ℓ of the whole batch, a scalar, with the gradient of ℓ in this rank's embeddings.

    The ranks have equally many embeddings (b, d), which are normalised here and must not be 0, and classes (b,).
    """
    with torch.autocast(embeddings.device.type, enabled=False):
        x = F.normalize(at_least_float32(embeddings), dim=-1)
        y, own, everything = world.gather(labels), world.part(world.size * len(x)), world.gather(x)
        x = torch.cat([everything[: own.start], x, everything[own.stop :]])
        itself = torch.eye(len(x), dtype=torch.bool, device=x.device)
        # Not −inf, so that a batch of one sentence has the gradient 0.
        log_shares = (x @ x.T / temperature).masked_fill(itself, torch.finfo(x.dtype).min).log_softmax(-1)
        is_positive = (y[:, None] == y) & ~itself
        of_sentences = log_shares.where(is_positive, 0.0).sum(-1) / is_positive.sum(-1).clamp(min=1)
        loss = -of_sentences.mean()
    return loss - loss.detach() * (1.0 - 1.0 / world.size)


def check_contrastive(weight: float, temperature: float) -> None:
    """Check λ and τ of the supervised contrastive loss."""
    if not 0.0 <= weight <= 1.0:
        raise ValueError(f"contrastive_weight = {weight:g} must lie in [0, 1]")
    if not 0.0 < temperature < math.inf:
        raise ValueError(f"contrastive_temperature = {temperature:g} must be positive and finite")


def token_labels(labels: Tensor, attention_mask: Tensor, *, with_padding: bool = False) -> Tensor:
    """Return labels (b, t) of tokens: each has the label (b,) of its sentence, and padding, where the mask is 0, has -100.

    With `with_padding`, padding has the label of the sentence too, as in the authors' code.
    """
    every = labels[:, None].expand(attention_mask.shape)
    return every if with_padding else every.masked_fill(attention_mask == 0, IGNORE_INDEX)


def _soft_similarities(x: Tensor, centers: Tensor, gamma: float) -> Tensor:
    similarities = torch.einsum("nd,ckd->nck", x, centers)
    return ((similarities / gamma).softmax(-1) * similarities).sum(-1)


def _distances(centers: Tensor, start: int, stop: int) -> Tensor:
    """Return Σ √(2 − 2·w^s·w^t + ε) over pairs s < t of centres (K, d) of one class with s in [start, stop)."""
    part = centers[start:stop]
    squares = 2.0 - 2.0 * part @ centers.T
    is_pair = torch.ones_like(squares, dtype=torch.bool).triu(start + 1)
    # Rounding may make a square slightly negative, so it is clamped. Masked entries are set to 1 before the root, so
    # that they have no infinite slope in the backward pass.
    return torch.where(is_pair, squares.clamp(min=0.0) + _EPSILON, 1.0).sqrt().where(is_pair, 0.0).sum()
