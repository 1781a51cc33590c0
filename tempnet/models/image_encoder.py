"""An image encoder trained on pairs of views of the same image (SimCLR, arXiv 2002.05709), and how it is saved.

    h = f(view),   z = W₂ max(W₁ h + b₁, 0) + b₂,   loss = ℓ(z/‖z‖ of the first views, z/‖z‖ of the second ones)

f is any Transformers vision model, W₁, W₂ the projection head g of §2.1, and ℓ any loss of `tempnet.contrastive.unimodal`:
with a fixed τ NT-Xent. Batch norms are over both views of the images of all ranks (`tempnet.models.batch_norm`). The head is
for training alone: a saved encoder is f with the configuration of its image processor, which Transformers loads.

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
from tempnet.network import check_embeddings


class TemperatureImageEncoder(nn.Module):
    """Vision model, projection head and contrastive loss, with its TempNet if it has one.

    `config` has the sizes of images and embeddings, which must be those of model and TempNet (else ValueError), and the mean
    and standard deviation of pixels. `autocast_dtype` is the dtype of the vision model's matrix products.
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
        check_embeddings(loss.tempnet, config.embedding_size)
        width = image_width(tower, config.image_size)
        self.config, self.autocast_dtype = config, autocast_dtype
        self.tower, self.loss = tower, loss
        synchronize_batch_norm(tower)
        self.head = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, config.embedding_size))
        # Pixels are bytes, so mean and standard deviation are 255 times those of the configuration.
        self.register_buffer("image_mean", 255.0 * torch.tensor(config.image_mean).view(3, 1, 1), persistent=False)
        self.register_buffer("image_std", 255.0 * torch.tensor(config.image_std).view(3, 1, 1), persistent=False)
        self.train()

    def features(self, images: Tensor) -> Tensor:
        """Return the features h (n, w) of uint8 images (n, S, S, 3), in the dtype of the head."""
        pixels = (images.permute(0, 3, 1, 2).to(self.image_mean.dtype) - self.image_mean) / self.image_std
        autocast = self.autocast_dtype
        with torch.autocast(images.device.type, dtype=autocast, enabled=autocast is not None):
            return image_features(self.tower, pixels).to(self.image_mean.dtype)

    def embed(self, images: Tensor) -> Tensor:
        """Return the embeddings z/‖z‖ (n, d) of uint8 images (n, S, S, 3)."""
        return F.normalize(self.head(self.features(images)), dim=-1)

    def forward(self, images: Tensor, ids: Tensor, *, gamma: float) -> ContrastiveOutput:
        """Compute the loss of this rank's images, pairs of views, uint8 (n, 2, S, S, 3), with ids (n,) and γ (`gamma_at`)."""
        first, second = self.embed(images.transpose(0, 1).flatten(0, 1)).chunk(2)
        output: ContrastiveOutput = self.loss(first, second, ids, gamma=gamma)
        return output

    def save_pretrained(self, directory: str | Path) -> None:
        """Save the vision model and the configuration of its image processor."""
        self.tower.save_pretrained(directory)
        (Path(directory) / PREPROCESSOR_FILE).write_text(json.dumps(self.config.preprocessor(), indent=2) + "\n")
