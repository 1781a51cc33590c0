"""The temperature around which others are looked for, where the model has none of its own."""

from __future__ import annotations

import torch

from jobs.scoring.headroom.pairs.galleries import galleries
from jobs.scoring.headroom.pairs.measure import EmbeddedWindow
from tempnet.contrastive.retrieval import cross_entropy

# From 2⁻¹⁰ to 2⁶, because cosines lie in [−1, 1]: below, all of softmax is on the best candidate, above, it is uniform.
CANDIDATES = tuple(2.0 ** (number / 2) for number in range(-20, 13))


def find_unit_tau(embedded: EmbeddedWindow, gallery_images: int, seed: int) -> float:
    """Returns the one of `CANDIDATES` with the lowest cross-entropy in the first gallery, both directions together.

    A profile covers 8 times less to 8 times more, in which the best constant is then found exactly. Because the
    candidates are far apart, rounding in the embeddings does not change the choice from one machine to another.
    """
    gallery = galleries(embedded.window, gallery_images, seed)[0]
    place = torch.full((len(embedded.images),), -1)
    place[gallery.images] = torch.arange(len(gallery.images))
    owners = place[embedded.owners]
    is_inside = owners >= 0
    image, text = torch.tensor(embedded.images)[gallery.images], torch.tensor(embedded.texts)[is_inside]

    def loss(tau: float) -> float:
        return cross_entropy(image, text, owners[is_inside], (torch.tensor([tau]), torch.tensor([tau])))

    return min(CANDIDATES, key=loss)
