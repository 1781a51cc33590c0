"""An image encoder trained on pairs of views of the same image (SimCLR, arXiv 2002.05709), and how it is saved.

    h = f(view),   z = W₂ max(W₁ h + b₁, 0) + b₂,   loss = ℓ(z/‖z‖ of the first views, z/‖z‖ of the second ones)

f is any Transformers vision model, W₁, W₂ the projection head g of §2.1, and ℓ any loss of `tempnet.contrastive.unimodal`:
with a fixed τ NT-Xent. The head is for training alone: what is saved and evaluated are the features h. A saved encoder
is a Transformers model with the configuration of its image processor, which Transformers loads without this project.

Batch norms of f are over both views of the images of all ranks (`tempnet.models.batch_norm`).

Shapes: n images on this rank, S pixels per side, w width of the features h, d dimensions of an embedding z.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from tempnet.contrastive.losses import ContrastiveOutput
from tempnet.contrastive.unimodal import UnimodalLoss
from tempnet.models.batch_norm import synchronize_batch_norm
from tempnet.models.dual_encoder_config import PREPROCESSOR_FILE, DualEncoderConfig
from tempnet.models.towers import image_features, image_width


class TemperatureImageEncoder(nn.Module):
    """Vision model, projection head and contrastive loss, with its TempNet if it has one.

    `config` has the sizes of images and embeddings, and the mean and standard deviation of pixels. A vision model that takes
    no images of this size, and a TempNet on embeddings of another size, raise ValueError. `autocast_dtype` is the dtype of
    the vision model's matrix products; the head and the loss stay in float32.
    """

    image_mean: Tensor
    image_std: Tensor

    def __init__(
        self,
        tower: PreTrainedModel,
        loss: UnimodalLoss,
        config: DualEncoderConfig,
        *,
        autocast_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        size = config.embedding_size
        if loss.tempnet is not None and loss.tempnet.config.input_size != size:
            raise ValueError(
                f"the TempNet was built for embeddings of {loss.tempnet.config.input_size}, the encoder's have {size}"
            )
        width = image_width(tower, config.image_size)
        self.config, self.autocast_dtype = config, autocast_dtype
        self.tower, self.loss = tower, loss
        synchronize_batch_norm(tower)
        self.head = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, size))
        # Pixels are bytes, so mean and standard deviation are 255 times those of the configuration.
        self.register_buffer("image_mean", 255.0 * torch.tensor(config.image_mean).view(3, 1, 1), persistent=False)
        self.register_buffer("image_std", 255.0 * torch.tensor(config.image_std).view(3, 1, 1), persistent=False)
        self.train()

    def features(self, images: Tensor) -> Tensor:
        """Return the features h (n, w) of uint8 images (n, S, S, 3), in the dtype of the head."""
        pixels = (images.permute(0, 3, 1, 2).to(self.image_mean.dtype) - self.image_mean) / self.image_std
        autocast = self.autocast_dtype
        with torch.autocast(images.device.type, dtype=autocast or torch.bfloat16, enabled=autocast is not None):
            return image_features(self.tower, pixels).to(self.image_mean.dtype)

    def embed(self, images: Tensor) -> Tensor:
        """Return the embeddings z/‖z‖ (n, d) of uint8 images (n, S, S, 3)."""
        return F.normalize(self.head(self.features(images)), dim=-1)

    def forward(self, images: Tensor, ids: Tensor, *, gamma: float) -> ContrastiveOutput:
        """Compute the loss of this rank's images, given as pairs of views, uint8 (n, 2, S, S, 3), and their ids (n,).

        γ is that of the moving averages (`tempnet.contrastive.config.gamma_at`).
        """
        first, second = self.embed(images.transpose(0, 1).flatten(0, 1)).chunk(2)
        output: ContrastiveOutput = self.loss(first, second, ids, gamma=gamma)
        return output

    def save_pretrained(self, directory: str | Path) -> None:
        """Save the vision model and the configuration of its image processor."""
        self.tower.save_pretrained(directory)
        (Path(directory) / PREPROCESSOR_FILE).write_text(json.dumps(self.config.preprocessor(), indent=2) + "\n")
