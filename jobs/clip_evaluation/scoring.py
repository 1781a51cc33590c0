"""From embeddings to figures: recall both ways on images with captions, accuracy on images in classes."""

from __future__ import annotations

import numpy as np
import torch

from jobs.clip_evaluation.units import Embeddings
from tempnet.contrastive.retrieval import recall
from tempnet.contrastive.zero_shot import accuracy, class_embeddings


def retrieval_figures(image: Embeddings, text: Embeddings, image_of_text: np.ndarray) -> dict[str, float]:
    """Recalls among the images that could be read, and their texts.

    Args:
        image_of_text: (m,) the number of the image of every text, in the order of `text`.
    """
    row_of_image = np.full(max(image_of_text.max(), image.numbers.max()) + 1, -1)
    row_of_image[image.numbers] = np.arange(len(image.numbers))
    rows = row_of_image[image_of_text]
    kept = rows >= 0
    figures = recall(
        torch.from_numpy(image.rows), torch.from_numpy(text.rows[kept]), torch.from_numpy(rows[kept])
    )
    return {**figures, "num_images": len(image.rows), "num_texts": int(kept.sum())}


def zero_shot_figures(image: Embeddings, prompts: Embeddings, labels: np.ndarray) -> dict[str, float]:
    """Accuracies over the images that could be read.

    Args:
        prompts: of all classes, as many for each, those of the first class first.
        labels: (n,) the class of every image of the data set, readable or not.
    """
    num_classes = int(labels.max()) + 1  # no folder is empty
    classes = class_embeddings(torch.from_numpy(prompts.rows).unflatten(0, (num_classes, -1)))
    figures = accuracy(torch.from_numpy(image.rows), classes, torch.from_numpy(labels[image.numbers]))
    return {**figures, "num_images": len(image.rows), "num_classes": num_classes}
