"""Recall@k and cross-entropy of image–text retrieval in both directions, computed in tiles of the score matrix.

Shapes: n images, m texts, d dimensions of an embedding.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tempnet.contrastive.ranks import check_embeddings, check_ids, hits, num_at_least, on_grid
from tempnet.contrastive.tiles import clamp_cosines

KS = (1, 5, 10)


@torch.no_grad()
def recall(
    image: Tensor, text: Tensor, image_of_text: Tensor, ks: Sequence[int] = KS, tile_size: int = 2048
) -> dict[str, float]:
    """Return recalls: the shares, from 0 to 1, of queries that have a matching candidate among the k best of all.

    `text_recall@k` (image → text, TR@k): the query is an image that has texts, and any of its texts is among the k
    best of all texts. `image_recall@k` (text → image, IR@k): the query is a text, and its image is among the k best
    of all images, including images without a text. `mean_recall` is the mean of these 2·len(ks) figures (Radford et
    al. 2021; Qiu et al. 2024).

    The rank of a query is 1 + the number of non-matching candidates whose score is at least that of the best match.
    Ties and NaN count against the query, so a collapsed model, whose embeddings are all equal, finds nothing. The
    scores are exact (:mod:`tempnet.contrastive.ranks`), so the figures are the same for every tile size and device.

    Args:
        image: (n, d) unit vectors.
        text: (m, d) unit vectors.
        image_of_text: (m,) integers, the row of `image` that each text belongs to.
        ks: values of k.
        tile_size: side of the tiles of scores; memory is O(tile_size²) plus copies of the embeddings in float64.

    Raises:
        ValueError: if shapes are empty or do not fit together, or an image number does not exist.
    """
    _check(image, text, image_of_text)
    image_ranks, text_ranks = _compute_ranks(
        on_grid(image), on_grid(text), image_of_text.to(image.device, torch.int64), tile_size
    )
    figures = {f"text_recall@{k}": hits(image_ranks, k) for k in ks}
    figures |= {f"image_recall@{k}": hits(text_ranks, k) for k in ks}
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

    This is CLIP's loss (Radford et al. 2021) with all held-out pairs as the batch, except that other texts of an
    image are not its negatives. Unlike training losses, it can be compared between losses, ρ and batch sizes, and
    unlike a recall it changes with every score. A collapsed model has the value log(number of candidates).

    Args:
        image: (n, d) unit vectors.
        text: (m, d) unit vectors.
        image_of_text: (m,) integers, the row of `image` that each text belongs to.
        tau: temperatures of the images, (n,) or (1,), and of the texts, (m,) or (1,); None for a model without one.
        tile_size: side of the tiles of scores; memory is O(tile_size²) plus copies of the embeddings in float64.

    Raises:
        ValueError: if shapes are empty or do not fit together, or an image number does not exist.
    """
    _check(image, text, image_of_text)
    image, text, owner = image.double(), text.double(), image_of_text.to(image.device, torch.int64)
    image_tau, text_tau = (
        part.to(image).expand(count)
        for part, count in zip(tau or (image.new_ones(1), image.new_ones(1)), (len(image), len(text)), strict=True)
    )

    def scaled(scores: Tensor) -> Tensor:
        return scores if tau is not None else 2.0 * clamp_cosines(scores).atanh()

    image_sums, text_sums = image.new_full((len(image),), -torch.inf), text.new_full((len(text),), -torch.inf)
    for first in range(0, len(image), tile_size):
        rows = slice(first, first + tile_size)
        numbers = torch.arange(first, first + len(image[rows]), device=image.device)
        for start in range(0, len(text), tile_size):
            columns = slice(start, start + tile_size)
            scores = scaled(image[rows] @ text[columns].T)
            found = (scores / text_tau[columns]).logsumexp(0)
            text_sums[columns] = text_sums[columns].logaddexp(found)
            belongs = owner[columns] == numbers[:, None]
            found = (scores / image_tau[rows, None]).masked_fill_(belongs, -torch.inf).logsumexp(1)
            image_sums[rows] = image_sums[rows].logaddexp(found)
    own = scaled((image[owner] * text).sum(-1))
    to_text = image_sums[owner].logaddexp(own / image_tau[owner]) - own / image_tau[owner]
    to_image = text_sums - own / text_tau
    return float((to_text + to_image).mean() / 2)


def _check(image: Tensor, text: Tensor, image_of_text: Tensor) -> None:
    check_embeddings(image=image, text=text)
    if image_of_text.shape != (len(text),):
        raise ValueError(f"image_of_text has shape {tuple(image_of_text.shape)}: expected ({len(text)},), one per text")
    check_ids("image_of_text", image_of_text, len(image), "images")


def _compute_ranks(image: Tensor, text: Tensor, image_of_text: Tensor, tile_size: int) -> tuple[Tensor, Tensor]:
    """Return the ranks, from 1, of every image's best matching text (≤ n,) and of every text's image (m,).

    Images without a text are omitted. The embeddings must be on the grid (`on_grid`).
    """
    own = torch.cat(
        [
            (image[of] * rows).sum(-1)
            for of, rows in zip(image_of_text.split(tile_size), text.split(tile_size), strict=True)
        ]
    )
    best = own.new_full((len(image),), -torch.inf).scatter_reduce(0, image_of_text, own, "amax")
    image_ranks = image_of_text.new_ones(len(image))
    text_ranks = image_of_text.new_zeros(len(text))
    for first in range(0, len(image), tile_size):
        rows = slice(first, first + tile_size)
        numbers = torch.arange(first, first + len(image[rows]), device=image.device)
        for start in range(0, len(text), tile_size):
            columns = slice(start, start + tile_size)
            scores = image[rows] @ text[columns].T
            text_ranks[columns] += num_at_least(scores, own[columns], 0)  # This counts the text's own image once.
            belongs = image_of_text[columns] == numbers[:, None]
            image_ranks[rows] += num_at_least(scores.masked_fill_(belongs, -torch.inf), best[rows, None], 1)
    return image_ranks[image_of_text.bincount(minlength=len(image)) > 0], text_ranks
