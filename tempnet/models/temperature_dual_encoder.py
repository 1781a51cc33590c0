"""A dual encoder and a contrastive loss, with its TempNets, in one module whose forward returns the loss.

Data-parallel wrappers see one module with all parameters. The communication between ranks is part of the loss
(`tempnet.contrastive`), except for the statistics of batch norm (`tempnet.models.batch_norm`).

Shapes: b pairs on this rank, S pixels per side of an image, t text tokens, d dimensions of an embedding, d2
prototypes of a TempNet.
"""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor, nn

from tempnet.contrastive.losses import ContrastiveLoss, ContrastiveOutput
from tempnet.models.dual_encoder import DualEncoder
from tempnet.network import TempNet


class TemperatureDualEncoder(nn.Module):
    """Dual encoder with a contrastive loss, which contains the TempNets if it needs them.

    The encoder is None if the module is only given embeddings that frozen towers have computed before. A frozen one stays in
    eval mode, runs without a graph, and is not trained. A TempNet on embeddings of another size raises ValueError.
    """

    def __init__(self, encoder: DualEncoder | None, loss: ContrastiveLoss, *, freeze_encoder: bool = False) -> None:
        super().__init__()
        for modality, network in (("image", loss.image_tempnet), ("text", loss.text_tempnet)):
            if encoder and network is not None and network.config.input_size != encoder.config.embedding_size:
                raise ValueError(
                    f"the {modality} TempNet was built for embeddings of {network.config.input_size}, "
                    f"the encoder's have {encoder.config.embedding_size}"
                )
        self.encoder = encoder
        self.loss = loss
        self.freeze_encoder = freeze_encoder
        if encoder is not None and freeze_encoder:
            encoder.requires_grad_(False)
        self.train()

    def train(self, mode: bool = True) -> TemperatureDualEncoder:
        """Set the mode as nn.Module.train does, but keep a frozen encoder in eval mode.

        A frozen encoder thus has no dropout, and its batch norms do not update their statistics.
        """
        super().train(mode)
        if self.encoder is not None and self.freeze_encoder:
            self.encoder.eval()
        return self

    def forward(self, *, ids: Tensor, image_ids: Tensor, gamma: float, **inputs: Tensor) -> ContrastiveOutput:
        """Compute the loss of this rank's pairs.

        Args:
            ids, image_ids: (b,) int64 ids of the pairs and of their images.
            gamma: γ of the moving averages (`tempnet.contrastive.config.gamma_at`).
            inputs: images, uint8 (b, S, S, 3), with input_ids and attention_mask of the captions, (b, t) each (1 token, 0
                padding); or image_embeddings and text_embeddings, (b, d) unit vectors.
        """
        image, text = self.embed(**inputs)
        return self.loss(image, text, ids, image_ids, gamma=gamma)

    def embed(
        self,
        *,
        images: Tensor | None = None,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_embeddings: Tensor | None = None,
        text_embeddings: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the embeddings of images and texts, (b, d) each: those that are given, or else the towers compute them."""
        if image_embeddings is not None and text_embeddings is not None:
            return image_embeddings, text_embeddings
        assert self.encoder is not None
        assert images is not None
        assert input_ids is not None
        assert attention_mask is not None
        with torch.no_grad() if self.freeze_encoder else contextlib.nullcontext():
            return self.encoder.encode_images(images), self.encoder.encode_texts(input_ids, attention_mask)

    def init_prototypes(self, image_embeddings: Tensor, text_embeddings: Tensor) -> None:
        """Set the prototypes of each TempNet from the first d2 embeddings of its own modality (TempNet Appendix D.1).

        The embeddings (d2 or more, d) are unit vectors of randomly chosen training images and texts, the same on all ranks. A
        TempNet without a projection layer (ablation) has no prototypes and is skipped. Fewer than d2 embeddings, and a loss
        without TempNets, raise ValueError.
        """
        for network, embeddings in zip(self._tempnets(), (image_embeddings, text_embeddings), strict=True):
            if network.config.projection:
                network.init_prototypes(embeddings)

    @torch.no_grad()
    def predict_temperatures(self, image_embeddings: Tensor, text_embeddings: Tensor) -> tuple[Tensor, Tensor]:
        """Return τ of images (n,) and of texts (m,), given their embeddings (n, d) and (m, d).

        A loss without TempNets raises ValueError.
        """
        image_tempnet, text_tempnet = self._tempnets()
        return image_tempnet(image_embeddings), text_tempnet(text_embeddings)

    def _tempnets(self) -> tuple[TempNet, TempNet]:
        image, text = self.loss.image_tempnet, self.loss.text_tempnet
        if image is None or text is None:
            raise ValueError(f"the loss {self.loss.config.name!r} has no TempNets")
        return image, text
