"""Recall@k of images by texts and of texts by images, and the cross-entropy of finding them, in tiles of the score matrix.

Shapes: n images, m texts, d embedding size.
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
    """Shares, from 0 to 1, of the queries that find what belongs to them among the k best of all candidates.

    `text_recall@k`: an image finds any of its texts among the k best of all texts (image → text, TR@k). An image without a
    text is no query. `image_recall@k`: a text finds its image among the k best of all images (text → image, IR@k), those
    without a text included. `mean_recall` is the mean of these 2·len(ks) figures (Radford et al. 2021; Qiu et al. 2024).

    Rank = 1 + the number of candidates that do not belong to the query and score at least as high as its own best. Ties
    count against the query, so that a collapsed model, all of whose embeddings are equal, finds nothing; so does NaN. The
    scores are exact (:mod:`tempnet.contrastive.ranks`), hence the figures are the same for every tile size and device.

    Args:
        image: (n, d) unit rows.
        text: (m, d) unit rows.
        image_of_text: (m,) integers, the row of `image` that each text belongs to.
        tile_size: edge of the tiles of scores; memory is O(tile_size²) beside copies of the embeddings in float64.

    Raises:
        ValueError: for empty or unequal shapes, or an image number that does not exist.
    """
    _check(image, text, image_of_text)
    image_ranks, text_ranks = _ranks(
        on_grid(image), on_grid(text), image_of_text.to(image.device, torch.int64), tile_size
    )
    figures = {f"text_recall@{k}": hits(image_ranks, k) for k in ks}
    figures |= {f"image_recall@{k}": hits(text_ranks, k) for k in ks}
    return figures | {"mean_recall": sum(figures.values()) / len(figures)}


@torch.no_grad()
def cross_entropy(
    image: Tensor, text: Tensor, image_of_text: Tensor, tau: tuple[Tensor, Tensor] | None, tile_size: int = 2048
) -> float:
    """−log of the probability that a pair is found among all candidates, in nats: the mean over texts and both directions.

    With f(s) = s/τ of the query, or 2·artanh(s) where there is no temperature (arXiv 2501.17683), text j of image i costs

        image → text: log(e^{f(s_ij)} + Σ_{k not of i} e^{f(s_ik)}) − f(s_ij)
        text → image: log Σ_l e^{f(s_lj)} − f(s_ij)

    CLIP's loss (Radford et al. 2021) with all held-out pairs in the place of the batch, and other texts of an image no
    negatives of it: comparable between losses, ρ and batch sizes, where training losses are not. Unlike a recall it moves
    with every score. A collapsed model costs log(candidates).

    Args:
        image: (n, d) unit rows.
        text: (m, d) unit rows.
        image_of_text: (m,) integers, the row of `image` that each text belongs to.
        tau: of the images (n,) and of the texts (m,), or one for all of them (1,); None: temperature-free.
        tile_size: edge of the tiles of scores; memory is O(tile_size²) beside copies of the embeddings in float64.

    Raises:
        ValueError: for empty or unequal shapes, or an image number that does not exist.
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
        raise ValueError(f"image_of_text has shape {tuple(image_of_text.shape)}: expected ({len(text)},), one a text")
    check_ids("image_of_text", image_of_text, len(image), "images")


def _ranks(image: Tensor, text: Tensor, image_of_text: Tensor, tile_size: int) -> tuple[Tensor, Tensor]:
    """Ranks from 1 of the best own text of every image that has one (≤ n,), and of every text's own image (m,)."""
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
            text_ranks[columns] += num_at_least(scores, own[columns], 0)  # its own image among them, once
            belongs = image_of_text[columns] == numbers[:, None]
            image_ranks[rows] += num_at_least(scores.masked_fill_(belongs, -torch.inf), best[rows, None], 1)
    return image_ranks[image_of_text.bincount(minlength=len(image)) > 0], text_ranks
