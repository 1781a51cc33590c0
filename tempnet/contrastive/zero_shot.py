"""Zero-shot classification: a class is the mean of its prompts' embeddings, and an image belongs to the nearest class.

Shapes: n images, C classes, P prompts per class, d dimensions of an embedding.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tempnet.contrastive.ranks import check_embeddings, check_ids, hits, num_at_least, on_grid

KS = (1, 3, 5)


def class_embeddings(prompts: Tensor) -> Tensor:
    """Return the normalised means over the prompts (Radford et al. 2021, §3.1.4).

    Args:
        prompts: (C, P, d) unit vectors.

    Returns:
        (C, d) unit vectors.
    """
    return F.normalize(prompts.mean(1), dim=-1)


@torch.no_grad()
def accuracy(
    image: Tensor, classes: Tensor, class_of_image: Tensor, ks: Sequence[int] = KS, tile_size: int = 2048
) -> dict[str, float]:
    """Return `top@k`: the shares, from 0 to 1, of images whose class is among the k classes with the highest scores.

    Ties and NaN count against the image, and the scores are exact, as in :mod:`tempnet.contrastive.retrieval`.

    Args:
        image: (n, d) unit vectors.
        classes: (C, d) unit vectors.
        class_of_image: (n,) integers, the number of each image's class.
        ks: values of k.
        tile_size: number of images that are processed at a time.

    Raises:
        ValueError: if shapes are empty or do not fit together, or a class number does not exist.
    """
    check_embeddings(image=image, classes=classes)
    if class_of_image.shape != (len(image),):
        raise ValueError(
            f"class_of_image has shape {tuple(class_of_image.shape)}: expected ({len(image)},), one per image"
        )
    check_ids("class_of_image", class_of_image, len(classes), "classes")
    classes, ranks = on_grid(classes), []
    for rows, labels in zip(image.split(tile_size), class_of_image.to(image.device).split(tile_size), strict=True):
        scores = on_grid(rows) @ classes.T
        ranks.append(num_at_least(scores, scores.gather(1, labels[:, None]), 1))
    return {f"top@{k}": hits(torch.cat(ranks), k) for k in ks}
