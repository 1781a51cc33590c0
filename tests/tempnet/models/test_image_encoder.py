"""Image encoders trained on two views: the loss is that of the papers' formula, and Transformers loads what is saved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoImageProcessor, AutoModel

from tempnet import TempNet, TempNetConfig
from tempnet.contrastive.config import ContrastiveLossConfig
from tempnet.contrastive.unimodal import UnimodalLoss
from tempnet.models.dual_encoder_config import DualEncoderConfig
from tempnet.models.image_encoder import TemperatureImageEncoder
from tempnet.models.towers import random_tower

NUM_IMAGES, SIZE = 6, 32


def make_encoder(loss: UnimodalLoss) -> TemperatureImageEncoder:
    torch.manual_seed(0)
    sizes = {"hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}
    tower = random_tower("resnet", "image", embedding_size=8, **sizes)
    return TemperatureImageEncoder(tower, loss, DualEncoderConfig(embedding_size=4, image_size=SIZE))


def views() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(256, (NUM_IMAGES, 2, SIZE, SIZE, 3), dtype=torch.uint8, generator=generator)


def test_the_loss_is_the_cross_entropy_of_every_view_with_the_other_one_of_its_image() -> None:
    """Other losses on one space are those of test_losses.py."""
    encoder = make_encoder(UnimodalLoss(ContrastiveLossConfig.for_name("clip_fixed", tau=0.2))).double()
    images = views()
    found = encoder(images, torch.arange(NUM_IMAGES), gamma=1.0)["loss"]
    mean, std = (
        torch.tensor(value, dtype=torch.float64) for value in (encoder.config.image_mean, encoder.config.image_std)
    )
    rows = torch.cat([images[:, 0], images[:, 1]])  # batch norms see both views at once
    pixels = ((rows / 255.0 - mean) / std).permute(0, 3, 1, 2)
    hidden = encoder.tower(pixel_values=pixels)["pooler_output"].flatten(1)
    first, _, last = encoder.head
    z = F.normalize(F.linear(F.linear(hidden, first.weight, first.bias).relu(), last.weight, last.bias), dim=-1)
    itself = torch.eye(2 * NUM_IMAGES, dtype=torch.bool)
    logits = (z @ z.T / 0.2).masked_fill(itself, -torch.inf)
    expected = F.cross_entropy(logits, torch.arange(2 * NUM_IMAGES).roll(NUM_IMAGES))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    parameters = list(encoder.parameters())
    for one, other in zip(*(torch.autograd.grad(loss, parameters) for loss in (found, expected)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)  # means are float32


def test_transformers_loads_the_features_and_a_tempnet_of_another_size_is_refused(tmp_path: Path) -> None:
    encoder = make_encoder(UnimodalLoss(ContrastiveLossConfig.for_name("clip_fixed"))).eval()
    encoder.save_pretrained(tmp_path)
    image = views()[:1, 0]
    pixels = AutoImageProcessor.from_pretrained(tmp_path)(image[0].numpy(), return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        found = AutoModel.from_pretrained(tmp_path).eval()(pixels)["pooler_output"].flatten(1)
        torch.testing.assert_close(found, encoder.features(image), rtol=1e-4, atol=1e-5)
    loss = UnimodalLoss(
        ContrastiveLossConfig.for_name("tempnet_in_batch"), tempnet=TempNet(TempNetConfig.for_embeddings(5, rho=0.5))
    )
    with pytest.raises(ValueError, match=r"the TempNet was built for embeddings of 5, the encoder's have 4"):
        make_encoder(loss)
