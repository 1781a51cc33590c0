"""Recall@k and cross-entropy of image–text retrieval, and zero-shot accuracy, computed in tiles of the score matrix.

Ranks are computed from exact inner products, so that they do not depend on tiles, devices or the order of sums: with
rounded ones, a model whose embeddings are all equal could have any recall. All coordinates are rounded to a grid of 2⁻²⁴,
which is as fine as float32 just below 1. Their products lie on a grid of 2⁻⁴⁸, and partial sums of these stay below 2 (by
the Cauchy-Schwarz inequality), so that float64 represents them without rounding.

Shapes: n images, m texts, C classes, P prompts per class, d dimensions of an embedding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tempnet.contrastive.tiles import clamp_cosines

KS, CLASS_KS = (1, 5, 10), (1, 3, 5)
_GRID = float(1 << 24)


@torch.no_grad()
def recall(
    image: Tensor, text: Tensor, image_of_text: Tensor, ks: Sequence[int] = KS, tile_size: int = 2048
) -> dict[str, float]:
    """Return recalls: the shares, from 0 to 1, of queries that have a matching candidate among the k best of all.

    `text_recall@k` (image → text, TR@k): the query is an image that has texts, and any of its texts is among the k best.
    `image_recall@k` (text → image, IR@k): the query is a text, and its image is among the k best, including images
    without a text. `mean_recall` is the mean of these 2·len(ks) figures (Radford et al. 2021; Qiu et al. 2024).

    The rank of a query is 1 + the number of non-matching candidates whose score is at least that of the best match.
    Ties and NaN count against the query, so a collapsed model, whose embeddings are all equal, finds nothing.

    Images (n, d) and texts (m, d) are unit vectors, and `image_of_text` (m,) has the row of the image that each text belongs
    to. Shapes that are empty or do not fit together, and an image number that does not exist, raise ValueError. Memory is
    O(tile_size²) plus copies of the embeddings in float64.
    """
    _check("image_of_text", image_of_text, "text", "images", image=image, text=text)
    image, text, owner = on_grid(image), on_grid(text), image_of_text.to(image.device, torch.int64)
    parts = zip(owner.split(tile_size), text.split(tile_size), strict=True)
    own = torch.cat([(image[of] * rows).sum(-1) for of, rows in parts])
    best = own.new_full((len(image),), -torch.inf).scatter_reduce(0, owner, own, "amax")
    image_ranks, text_ranks = owner.new_ones(len(image)), owner.new_zeros(len(text))
    for rows, columns, scores, belongs in _tiles(image, text, owner, tile_size):
        text_ranks[columns] += _num_at_least(scores, own[columns], 0)  # This counts the text's own image once.
        image_ranks[rows] += _num_at_least(scores.masked_fill_(belongs, -torch.inf), best[rows, None], 1)
    image_ranks = image_ranks[owner.bincount(minlength=len(image)) > 0]
    figures = {f"text_recall@{k}": _share_within(image_ranks, k) for k in ks}
    figures |= {f"image_recall@{k}": _share_within(text_ranks, k) for k in ks}
    return figures | {"mean_recall": sum(figures.values()) / len(figures)}


@torch.no_grad()
def cross_entropy(
    image: Tensor, text: Tensor, image_of_text: Tensor, tau: tuple[Tensor, Tensor] | None, tile_size: int = 2048
) -> float:
    """Return the mean of −log(probability of a pair among all candidates) over texts and both directions, in nats.

    With s_ij the similarity of image i and text j, and f(s) = s/τ with the τ of the query, or 2·artanh(s) for a model
    without a temperature (arXiv 2501.17683), the terms of text j of image i are

        image → text: log(e^{f(s_ij)} + Σ_{k not of i} e^{f(s_ik)}) − f(s_ij)
        text → image: log Σ_l e^{f(s_lj)} − f(s_ij)

    This is CLIP's loss (Radford et al. 2021) with all held-out pairs as the batch, except that other texts of an image
    are not its negatives. It can be compared between losses, ρ and batch sizes. A collapsed model has the value
    log(number of candidates). `tau` are temperatures of the images, (n,) or (1,), and of the texts, (m,) or (1,); None
    for a model without one. Other arguments and errors are those of :func:`recall`.
    """
    _check("image_of_text", image_of_text, "text", "images", image=image, text=text)
    image, text, owner = image.double(), text.double(), image_of_text.to(image.device, torch.int64)
    image_tau, text_tau = (
        part.to(image).expand(count)
        for part, count in zip(tau or (image.new_ones(1), image.new_ones(1)), (len(image), len(text)), strict=True)
    )

    def scaled(scores: Tensor) -> Tensor:
        return scores if tau is not None else 2.0 * clamp_cosines(scores).atanh()

    image_sums, text_sums = image.new_full((len(image),), -torch.inf), text.new_full((len(text),), -torch.inf)
    for rows, columns, cosines, belongs in _tiles(image, text, owner, tile_size):
        scores = scaled(cosines)
        found = (scores / text_tau[columns]).logsumexp(0)
        text_sums[columns] = text_sums[columns].logaddexp(found)
        found = (scores / image_tau[rows, None]).masked_fill_(belongs, -torch.inf).logsumexp(1)
        image_sums[rows] = image_sums[rows].logaddexp(found)
    own = scaled((image[owner] * text).sum(-1))
    to_text = image_sums[owner].logaddexp(own / image_tau[owner]) - own / image_tau[owner]
    to_image = text_sums - own / text_tau
    return float((to_text + to_image).mean() / 2)


def class_embeddings(prompts: Tensor) -> Tensor:
    """Return the normalised means (C, d) over the prompts' unit vectors (C, P, d) (Radford et al. 2021, §3.1.4)."""
    return F.normalize(prompts.mean(1), dim=-1)


@torch.no_grad()
def accuracy(
    image: Tensor, classes: Tensor, class_of_image: Tensor, ks: Sequence[int] = CLASS_KS, tile_size: int = 2048
) -> dict[str, float]:
    """Return `top@k`: the shares, from 0 to 1, of images whose class is among the k classes with the highest scores.

    Ties and NaN count against the image. Images (n, d) and classes (C, d; :func:`class_embeddings`) are unit vectors, and
    each image has the number of its class (n,). Shapes that are empty or do not fit, and numbers that do not exist, raise
    ValueError. `tile_size` images are processed at a time.
    """
    _check("class_of_image", class_of_image, "image", "classes", classes=classes, image=image)
    classes, ranks = on_grid(classes), []
    for rows, labels in zip(image.split(tile_size), class_of_image.to(image.device).split(tile_size), strict=True):
        scores = on_grid(rows) @ classes.T
        ranks.append(_num_at_least(scores, scores.gather(1, labels[:, None]), 1))
    return {f"top@{k}": _share_within(torch.cat(ranks), k) for k in ks}


def on_grid(embeddings: Tensor) -> Tensor:
    """Round unit vectors (…, d) to multiples of 2⁻²⁴ and return them in float64, so that inner products are exact."""
    return (embeddings.double() * _GRID).round() / _GRID


def _num_at_least(scores: Tensor, own: Tensor, dim: int) -> Tensor:
    """Count, along a dimension, the scores that are not below `own`; ties and NaN therefore count against the query."""
    return (~(scores < own)).sum(dim)


def _share_within(ranks: Tensor, k: int) -> float:
    """Return the share of ranks (n,), counted from 1, that are at most k."""
    return float((ranks <= k).double().mean())


def _tiles(image: Tensor, text: Tensor, owner: Tensor, tile_size: int) -> Iterator[tuple[slice, slice, Tensor, Tensor]]:
    """Yield rows, columns and scores of tiles, and which of their texts belong to their images."""
    for first in range(0, len(image), tile_size):
        rows = slice(first, first + tile_size)
        numbers = torch.arange(first, first + len(image[rows]), device=image.device)
        for start in range(0, len(text), tile_size):
            columns = slice(start, start + tile_size)
            yield rows, columns, image[rows] @ text[columns].T, owner[columns] == numbers[:, None]


def _check(name: str, numbers: Tensor, one: str, many: str, **embeddings: Tensor) -> None:
    """Raise ValueError for unsuitable embeddings, or numbers, one for each of the second ones, that no first ones have."""
    shapes = {name: tuple(tensor.shape) for name, tensor in embeddings.items()}
    for key, shape in shapes.items():
        if len(shape) != 2 or not shape[0]:
            raise ValueError(f"{key} has shape {shape}: expected (number, embedding size) with at least one row")
    if len({shape[1] for shape in shapes.values()}) > 1:
        raise ValueError(f"embeddings differ in size: {', '.join(f'{key} {shape}' for key, shape in shapes.items())}")
    (num_ids, _), (num, _) = shapes.values()
    if numbers.shape != (num,):
        raise ValueError(f"{name} has shape {tuple(numbers.shape)}: expected ({num},), one per {one}")
    wrong = numbers[(numbers < 0) | (numbers >= num_ids)]
    if len(wrong):
        raise ValueError(f"{name} holds {int(wrong[0])}, but there are {num_ids} {many}: expected 0 … {num_ids - 1}")
