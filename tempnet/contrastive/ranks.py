"""Inner products of unit embeddings that are exact, so that ranks do not depend on tiles, devices or the order of sums.

Shapes: n queries, d embedding size.

With rounded inner products, two equal embeddings may score differently in two corners of one matrix product, and a model
whose embeddings are all the same would get any recall. Coordinates on a grid of 2⁻²⁴, as fine as float32 is below 1, have
products on a grid of 2⁻⁴⁸, and partial sums of these stay below 2 (Cauchy-Schwarz): float64 holds them without rounding.
"""

from __future__ import annotations

from torch import Tensor

_GRID = float(1 << 24)


def on_grid(embeddings: Tensor) -> Tensor:
    """(…, d) unit rows in float64, every coordinate rounded to a multiple of 2⁻²⁴: their inner products are exact."""
    return (embeddings.double() * _GRID).round() / _GRID


def num_at_least(scores: Tensor, own: Tensor, dim: int) -> Tensor:
    """How many scores are not below `own`, along a dimension: a rank in which ties, and NaN, count against the query.

    Args:
        own: of the queries, broadcast against `scores`.
    """
    return (~(scores < own)).sum(dim)


def hits(ranks: Tensor, k: int) -> float:
    """The share of the ranks (n,), counted from 1, that are at most k."""
    return float((ranks <= k).double().mean())


def check_ids(name: str, ids: Tensor, num_ids: int, what: str) -> None:
    """Refuse ids (n,) outside 0 … num_ids − 1.

    Raises:
        ValueError: naming the first such id.
    """
    wrong = ids[(ids < 0) | (ids >= num_ids)]
    if len(wrong):
        raise ValueError(f"{name} holds {int(wrong[0])}, but there are {num_ids} {what}: expected 0 … {num_ids - 1}")


def check_embeddings(**embeddings: Tensor) -> None:
    """Refuse embeddings that are not matrices, are empty, or differ in size.

    Raises:
        ValueError: naming the tensor and its shape.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in embeddings.items()}
    for name, shape in shapes.items():
        if len(shape) != 2 or not shape[0]:
            raise ValueError(f"{name} has shape {shape}: expected (number, embedding size) with at least one row")
    if len({shape[1] for shape in shapes.values()}) > 1:
        raise ValueError(f"embeddings differ in size: {', '.join(f'{name} {shape}' for name, shape in shapes.items())}")
