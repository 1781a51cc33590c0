"""Test that an export of a dual encoder holds the constant temperature of its loss, if the loss has one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from clip_support import make_dual_encoder, make_tokenizer

from jobs.tasks.dual_encoder.export import export_encoder
from tempnet.contrastive.losses import ContrastiveLoss, ContrastiveLossConfig
from tempnet.models.dual_encoder import DualEncoder
from tempnet.models.temperature_dual_encoder import TemperatureDualEncoder
from tempnet.models.training_temperature import load_training_temperature


@pytest.mark.parametrize(("loss", "expected"), [("clip", 0.05), ("clip_fixed", 0.07), ("temperature_free", None)])
def test_an_export_holds_the_temperature_of_its_loss(loss: str, expected: float | None, tmp_path: Path) -> None:
    encoder = DualEncoder.from_pretrained(make_dual_encoder(tmp_path / "start"))
    module = TemperatureDualEncoder(encoder, ContrastiveLoss(ContrastiveLossConfig.for_name(loss)))
    if module.loss.learned is not None:
        with torch.no_grad():
            module.loss.learned.log_tau.fill_(torch.tensor(0.05).log())
    export_encoder(encoder, module.loss, make_tokenizer(), str(tmp_path / "export"))
    DualEncoder.from_pretrained(tmp_path / "export")
    found = load_training_temperature(tmp_path / "export")
    assert found is None if expected is None else found == pytest.approx(expected)
