"""Tests of a language model that learns from another: its loss is that of the logits, and the teacher is not its part."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, PreTrainedModel

from tempnet.distillation import TeacherTemperature, teacher_divergence
from tempnet.models.causal_lm import TemperatureCausalLM
from tempnet.models.distilled_lm import DistilledCausalLM
from tempnet.softmax.reference import IGNORE_INDEX, TemperatureLossConfig

VOCAB_SIZE, LENGTH = 50, 8
OPTIONS: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "attend_across_documents": True}


def make_base(seed: int, *, hidden_size: int = 16) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=VOCAB_SIZE + 3, n_positions=LENGTH, n_embd=hidden_size, n_layer=1, n_head=2, initializer_range=0.4,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


def make_batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    ids, targets = (torch.randint(VOCAB_SIZE, (2, LENGTH), generator=generator) for _ in range(2))
    targets[0, :3] = IGNORE_INDEX
    return {"input_ids": ids, "position_ids": torch.arange(LENGTH).expand(2, -1), "targets": targets}


@pytest.mark.parametrize(
    "temperature", [TeacherTemperature(tau=0.7), TeacherTemperature(rho=math.log(VOCAB_SIZE) - 3.0)]
)
def test_the_loss_in_training_is_the_divergence_from_the_teacher(temperature: TeacherTemperature) -> None:
    loss_config = TemperatureLossConfig(name="ce", rho=1.0)
    student, teacher, batch = make_base(0), make_base(1, hidden_size=32), make_batch()
    module = DistilledCausalLM(student, teacher, temperature, loss_config, **OPTIONS)
    output = module(**batch, with_statistics=True)
    arguments = {name: batch[name] for name in ("input_ids", "position_ids")}
    logits = [model(**arguments).logits[..., :VOCAB_SIZE].flatten(0, 1) for model in (student, teacher)]
    counts = batch["targets"].flatten() != IGNORE_INDEX
    expected = teacher_divergence(*logits, output["tau"].flatten())[counts].mean()
    assert float(output["loss"]) == pytest.approx(float(expected), rel=1e-5)
    assert torch.allclose(output["tau"].flatten(), temperature.of(logits[1].detach()), rtol=1e-5)
    output["loss"].backward()
    assert all(parameter.grad is None for parameter in teacher.parameters())
    assert all(parameter.grad is not None for parameter in student.parameters())
    assert module.state_dict().keys() == TemperatureCausalLM(
        make_base(0), None, loss_config, **OPTIONS
    ).state_dict().keys()  # fmt: skip

    plain = TemperatureCausalLM(student, None, loss_config, **OPTIONS)
    assert torch.equal(output["statistics"], plain(**batch, with_statistics=True)["statistics"])
    assert float(module.eval()(**batch)["loss"]) == pytest.approx(float(plain(**batch)["loss"]), rel=1e-6)
