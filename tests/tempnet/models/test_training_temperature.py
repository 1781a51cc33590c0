"""Test that a dual encoder's constant temperature is found where its training has left it, and only there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from clip_support import make_clip, make_dual_encoder
from safetensors.torch import load_file, save_file

from tempnet.contrastive.losses import ContrastiveLoss, ContrastiveLossConfig
from tempnet.models.training_temperature import load_training_temperature, save_training_temperature
from tempnet.network import TempNet
from tempnet.network_config import TempNetConfig


def test_a_clip_model_has_the_inverse_of_its_logit_scale(tmp_path: Path) -> None:
    directory = Path(make_clip(tmp_path))
    weights = load_file(directory / "model.safetensors")
    assert load_training_temperature(directory) == pytest.approx(1 / weights["logit_scale"].exp().item())
    weights["logit_scale"] = torch.tensor(100.0).log()
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    assert load_training_temperature(directory) == pytest.approx(0.01)
    del weights["logit_scale"]
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    assert load_training_temperature(directory) is None
    weights["logit_scale"] = torch.tensor(torch.nan)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"logit_scale of .*: the temperature nan must be positive and finite"):
        load_training_temperature(directory)


def test_an_export_has_what_was_saved_with_it(tmp_path: Path) -> None:
    directory = Path(make_dual_encoder(tmp_path))
    assert load_training_temperature(directory) is None
    save_training_temperature(directory, 0.0125)
    assert load_training_temperature(directory) == 0.0125
    (directory / "training_temperature.json").write_text('{"tau": 0}')
    with pytest.raises(ValueError, match="the temperature 0 must be positive and finite"):
        load_training_temperature(directory)
    (directory / "training_temperature.json").write_text('{"temperature": 0.1}')
    with pytest.raises(ValueError, match=r"training_temperature.json is no JSON object \{\"tau\": number\}"):
        load_training_temperature(directory)


def test_a_loss_has_a_constant_temperature_if_all_samples_share_it() -> None:
    learned = ContrastiveLoss(ContrastiveLossConfig.for_name("clip"))
    assert learned.learned is not None
    with torch.no_grad():
        learned.learned.log_tau.fill_(-3.0)
    assert learned.constant_tau == pytest.approx(torch.tensor(-3.0).exp().item())
    assert ContrastiveLoss(ContrastiveLossConfig.for_name("clip_fixed", tau=0.04)).constant_tau == 0.04
    assert ContrastiveLoss(ContrastiveLossConfig.for_name("temperature_free")).constant_tau is None
    networks = [TempNet(TempNetConfig.for_embeddings(6, hidden_size=4, num_prototypes=4)) for _ in range(2)]
    config = ContrastiveLossConfig.for_name("tempnet_in_batch")
    assert ContrastiveLoss(config, image_tempnet=networks[0], text_tempnet=networks[1]).constant_tau is None
