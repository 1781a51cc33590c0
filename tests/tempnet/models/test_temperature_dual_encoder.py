"""The contrastive module in one process: training, a frozen encoder, prototypes and predicted temperatures."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tempnet import TempNet, TempNetConfig
from tempnet.contrastive.losses import LOSS_KINDS, ContrastiveLoss, ContrastiveLossConfig
from tempnet.contrastive.state import SampleState
from tempnet.contrastive.world import World
from tempnet.models.temperature_dual_encoder import TemperatureDualEncoder
from tests.tempnet.models.rank_cases import NUM_PAIRS, make_module, pairs
from tests.tempnet.models.tiny_towers import tiny_encoder

WHOLE = slice(None)


def rows(num_rows: int, seed: int) -> torch.Tensor:
    return F.normalize(torch.randn(num_rows, 6, generator=torch.Generator().manual_seed(seed)), dim=-1)


@pytest.mark.parametrize("name", ["clip", "sogclr", "isogclr", "tempnet", "temperature_free", "tempnet_in_batch"])
def test_every_parameter_of_the_encoder_is_trained(name: str) -> None:
    assert name in LOSS_KINDS
    module = make_module(name, torch.float32, World.alone())
    output = module(**pairs(0, WHOLE), gamma=1.0)
    assert type(output) is dict
    assert output["loss"].shape == ()
    assert output["tau"].shape == (2, NUM_PAIRS)
    output["loss"].backward()
    without = [key for key, parameter in module.named_parameters() if parameter.grad is None]
    assert without == []
    assert all(torch.isfinite(parameter.grad).all() for parameter in module.parameters())


def test_training_brings_pairs_together() -> None:
    module = make_module("tempnet", torch.float32, World.alone())
    batch = pairs(0, WHOLE)
    batch["image_ids"] = batch["ids"]
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)

    def num_found() -> int:
        module.eval()
        image = module.encoder.encode_images(batch["images"])
        text = module.encoder.encode_texts(batch["input_ids"], batch["attention_mask"])
        module.train()
        return int(((image @ text.T).argmax(1) == torch.arange(NUM_PAIRS)).sum())

    before = num_found()
    for _ in range(40):
        module(**batch, gamma=0.8)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert before <= 4
    assert num_found() == NUM_PAIRS


def test_a_frozen_encoder_keeps_weights_and_statistics() -> None:
    module = make_module("tempnet", torch.float32, World.alone(), freeze_encoder=True).train()
    assert module.training
    assert not any(part.training for part in module.encoder.modules())
    before = {key: value.clone() for key, value in module.state_dict().items()}
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.1)
    first, second = (module(**pairs(0, WHOLE), gamma=1.0) for _ in range(2))
    assert first["loss"].item() == second["loss"].item()
    second["loss"].backward()
    assert all(parameter.grad is None for parameter in module.encoder.parameters())
    assert all(parameter.grad is not None for parameter in module.loss.parameters())
    optimizer.step()
    changed = {key for key, value in module.state_dict().items() if not torch.equal(value, before[key])}
    assert any("running_var" in key for key in before)
    assert changed
    assert all(key.startswith("loss.") for key in changed)


def test_prototypes_are_transformed_samples_of_their_own_modality() -> None:
    module = make_module("tempnet", torch.float32, World.alone())
    images, texts = rows(4, seed=1), rows(9, seed=2)
    module.init_prototypes(images, texts)
    for network, own in ((module.loss.image_tempnet, images), (module.loss.text_tempnet, texts[:4])):
        linear = network.first_layer
        expected = torch.sigmoid(F.linear(own, linear.weight, linear.bias)).T
        torch.testing.assert_close(network.projection.detach(), expected)
    with pytest.raises(ValueError, match=r"text TempNet has 4 prototypes, .* there are only 3"):
        module.init_prototypes(images, texts[:3])
    with pytest.raises(ValueError, match="'clip' has no TempNets"):
        make_module("clip", torch.float32, World.alone()).init_prototypes(images, texts)


def test_a_tempnet_without_projection_has_no_prototypes() -> None:
    config = ContrastiveLossConfig.for_name("tempnet", rho=1.2)
    settings = TempNetConfig.for_embeddings(6, rho=1.2, hidden_size=5, projection=False)
    loss = ContrastiveLoss(
        config,
        image_tempnet=TempNet(settings),
        text_tempnet=TempNet(settings),
        state=SampleState(20, config.state_columns),
    )
    module = TemperatureDualEncoder(tiny_encoder(), loss)
    before = {key: value.clone() for key, value in module.state_dict().items()}
    module.init_prototypes(rows(2, seed=1), rows(2, seed=2))
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())


def test_predicted_temperatures_are_those_of_the_loss() -> None:
    module = make_module("tempnet", torch.float32, World.alone()).eval()
    batch = pairs(0, WHOLE)
    image = module.encoder.encode_images(batch["images"])
    text = module.encoder.encode_texts(batch["input_ids"], batch["attention_mask"])
    tau = torch.stack(module.predict_temperatures(image, text))
    assert not tau.requires_grad
    torch.testing.assert_close(tau, module(**batch, gamma=1.0)["tau"])
    of_images, of_texts = module.predict_temperatures(image[:3], text)
    assert (len(of_images), len(of_texts)) == (3, NUM_PAIRS)


def test_a_tempnet_of_another_size_is_refused() -> None:
    config = ContrastiveLossConfig.for_name("tempnet", rho=1.2)
    right, wrong = (TempNet(TempNetConfig.for_embeddings(dim, rho=1.2, num_prototypes=4)) for dim in (6, 8))
    loss = ContrastiveLoss(config, image_tempnet=right, text_tempnet=wrong, state=SampleState(20, config.state_columns))
    with pytest.raises(ValueError, match="text TempNet was built for embeddings of 8, the encoder's have 6"):
        TemperatureDualEncoder(tiny_encoder(), loss)
