"""Zero-shot classification: a class is the mean of the embeddings of several prompts, an image belongs to the nearest.

Shapes: n images, C classes, P prompts a class, d embedding size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tempnet.contrastive.ranks import check_embeddings, check_ids, hits, num_at_least, on_grid

KS = (1, 3, 5)


def class_embeddings(prompts: Tensor) -> Tensor:
    """(C, d) unit rows of (C, P, d) unit rows: the mean over the prompts, normalised (Radford et al. 2021, §3.1.4)."""
    return F.normalize(prompts.mean(1), dim=-1)


@torch.no_grad()
def accuracy(
    image: Tensor, classes: Tensor, class_of_image: Tensor, ks: Sequence[int] = KS, tile_size: int = 2048
) -> dict[str, float]:
    """`top@k`: shares, from 0 to 1, of the images whose class is among the k that score highest.

    Ties and NaN count against the image, and the scores are exact, as in :mod:`tempnet.contrastive.retrieval`.

    Args:
        image: (n, d) unit rows.
        classes: (C, d) unit rows.
        class_of_image: (n,) integers.
        tile_size: images at a time.

    Raises:
        ValueError: for empty or unequal shapes, or a class number that does not exist.
    """
    check_embeddings(image=image, classes=classes)
    if class_of_image.shape != (len(image),):
        raise ValueError(
            f"class_of_image has shape {tuple(class_of_image.shape)}: expected ({len(image)},), one an image"
        )
    check_ids("class_of_image", class_of_image, len(classes), "classes")
    classes, ranks = on_grid(classes), []
    for rows, labels in zip(image.split(tile_size), class_of_image.to(image.device).split(tile_size), strict=True):
        scores = on_grid(rows) @ classes.T
        ranks.append(num_at_least(scores, scores.gather(1, labels[:, None]), 1))
    return {f"top@{k}": hits(torch.cat(ranks), k) for k in ks}
