"""Recall@k of images by texts and of texts by images, exact, in tiles of the score matrix.

Shapes: n images, m texts, d embedding size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tempnet.contrastive.ranks import check_embeddings, check_ids, hits, num_at_least, on_grid

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
    check_embeddings(image=image, text=text)
    if image_of_text.shape != (len(text),):
        raise ValueError(f"image_of_text has shape {tuple(image_of_text.shape)}: expected ({len(text)},), one a text")
    check_ids("image_of_text", image_of_text, len(image), "images")
    image_ranks, text_ranks = _ranks(
        on_grid(image), on_grid(text), image_of_text.to(image.device, torch.int64), tile_size
    )
    figures = {f"text_recall@{k}": hits(image_ranks, k) for k in ks}
    figures |= {f"image_recall@{k}": hits(text_ranks, k) for k in ks}
    return figures | {"mean_recall": sum(figures.values()) / len(figures)}


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
