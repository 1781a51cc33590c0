"""Compute exact inner products of unit embeddings, so that ranks do not depend on tiles, devices or the order of sums.

With rounded inner products, two equal embeddings may have different scores in different parts of one matrix product,
and a model whose embeddings are all equal could have any recall. Here all coordinates are rounded to a grid of 2⁻²⁴,
which is as fine as float32 just below 1. Their products lie on a grid of 2⁻⁴⁸, and partial sums of these stay below 2
(by the Cauchy-Schwarz inequality), so that float64 represents them without rounding.

Shapes: n queries, d dimensions of an embedding.
"""

from __future__ import annotations

from torch import Tensor

_GRID = float(1 << 24)


def on_grid(embeddings: Tensor) -> Tensor:
    """Round unit vectors (…, d) to multiples of 2⁻²⁴ and return them in float64, so that inner products are exact."""
    return (embeddings.double() * _GRID).round() / _GRID


def num_at_least(scores: Tensor, own: Tensor, dim: int) -> Tensor:
    """Count, along a dimension, the scores that are not below `own`; ties and NaN therefore count against the query.

    Args:
        scores: scores of the candidates.
        own: score of each query's own candidate, broadcast against `scores`.
        dim: dimension of `scores` to count along.
    """
    return (~(scores < own)).sum(dim)


def hits(ranks: Tensor, k: int) -> float:
    """Return the share of ranks (n,), counted from 1, that are at most k."""
    return float((ranks <= k).double().mean())


def check_ids(name: str, ids: Tensor, num_ids: int, what: str) -> None:
    """Reject ids (n,) outside 0 … num_ids − 1.

    Args:
        name: name of the argument, for the error message.
        ids: the ids to check.
        num_ids: number of valid ids.
        what: plural noun for what the ids identify, for the error message.

    Raises:
        ValueError: if an id is out of range; the message names the first one.
    """
    wrong = ids[(ids < 0) | (ids >= num_ids)]
    if len(wrong):
        raise ValueError(f"{name} holds {int(wrong[0])}, but there are {num_ids} {what}: expected 0 … {num_ids - 1}")


def check_embeddings(**embeddings: Tensor) -> None:
    """Reject embeddings that are not matrices, are empty, or differ in the number of dimensions.

    Raises:
        ValueError: if a tensor is unsuitable; the message names the tensors and their shapes.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in embeddings.items()}
    for name, shape in shapes.items():
        if len(shape) != 2 or not shape[0]:
            raise ValueError(f"{name} has shape {shape}: expected (number, embedding size) with at least one row")
    if len({shape[1] for shape in shapes.values()}) > 1:
        raise ValueError(f"embeddings differ in size: {', '.join(f'{name} {shape}' for name, shape in shapes.items())}")
