"""Distillation: gradients are those of float64 autograd, teachers have the entropy that is asked for, models are no parts."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tempnet import distillation
from tempnet.distillation import DistilledCausalLM, TeacherTemperature, distillation_loss, teacher_divergence
from tempnet.models.causal_lm import TemperatureCausalLM
from tempnet.softmax.config import TemperatureLossConfig
from tempnet.softmax.reference import IGNORE_INDEX
from tests.tempnet.tiny_language_models import make_base

V, D = 37, 5


def entropy(p: Tensor) -> Tensor:
    return -(p * p.clamp(min=1e-300).log()).sum(-1)


def make_case(num_tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return contexts of student and teacher, their output weights, and targets of which every third is ignored."""
    generator = torch.Generator().manual_seed(0)
    sizes = ((num_tokens, D), (num_tokens, D), (V, D), (V, D))
    contexts, of_teacher, weight, of_teacher_weight = (
        torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes
    )
    targets = torch.randint(V, (num_tokens,), generator=generator)
    targets[::3] = IGNORE_INDEX
    return contexts, of_teacher, weight, of_teacher_weight, targets


@pytest.mark.parametrize(
    "temperature", [TeacherTemperature(tau=1.0), TeacherTemperature(tau=0.6), TeacherTemperature(rho=math.log(V) - 2.5)]
)
@pytest.mark.parametrize("num_logits", [1 << 22, 4 * V])
def test_loss_and_gradients_are_those_of_autograd_whatever_the_chunks(
    temperature: TeacherTemperature, num_logits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distillation, "_NUM_LOGITS_PER_CHUNK", num_logits)
    contexts, of_teacher, weight, of_teacher_weight, targets = make_case(11)
    leaves = [contexts.clone().requires_grad_(), weight.clone().requires_grad_()]
    loss, tau = distillation_loss(
        leaves[0], of_teacher, targets,
        student_logits=lambda rows: rows @ leaves[1].T, teacher_logits=lambda rows: rows @ of_teacher_weight.T,
        temperature=temperature, vocab_size=V,
    )  # fmt: skip
    gradients = torch.autograd.grad(loss, leaves)

    whole = [contexts.clone().requires_grad_(), weight.clone().requires_grad_()]
    p = torch.softmax(of_teacher @ of_teacher_weight.T / tau.unsqueeze(-1), -1)
    q = torch.softmax(whole[0] @ whole[1].T, -1)
    counts = targets != IGNORE_INDEX
    expected = ((p * (p / q).log()).sum(-1)[counts]).sum() / counts.sum()
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-10)
    for gradient, reference in zip(gradients, torch.autograd.grad(expected, whole), strict=True):
        torch.testing.assert_close(gradient, reference, rtol=1e-8, atol=1e-12)
    if temperature.rho is not None:
        assert entropy(p).tolist() == pytest.approx([2.5] * 11, abs=1e-5)
    else:
        assert tau.tolist() == [temperature.tau] * 11


def test_the_sum_is_divided_by_the_number_that_is_given() -> None:
    contexts, of_teacher, weight, of_teacher_weight, targets = make_case(9)

    def loss(targets: Tensor, num_targets: float | None = None) -> float:
        return distillation_loss(
            contexts, of_teacher, targets, student_logits=lambda rows: rows @ weight.T,
            teacher_logits=lambda rows: rows @ of_teacher_weight.T, temperature=TeacherTemperature(tau=1.0), vocab_size=V,
            num_targets=num_targets,
        )[0].item()  # fmt: skip

    assert loss(targets) * 6 == pytest.approx(loss(targets, 12.0) * 12)
    assert loss(torch.full_like(targets, IGNORE_INDEX)) == 0.0


@pytest.mark.parametrize("values", [{}, {"rho": 1.0, "tau": 1.0}])
def test_a_temperature_is_constant_or_gives_a_constant_entropy(values: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="give one of them"):
        TeacherTemperature(**values)
    with pytest.raises(ValueError, match="tau = 0 must be positive"):
        TeacherTemperature(tau=0.0)


LENGTH = 8
OPTIONS: dict[str, Any] = {"vocab_size": V, "attend_across_documents": True}
NO_DROPOUT = dict.fromkeys(["resid_pdrop", "embd_pdrop", "attn_pdrop"], 0.0)
SIZES: dict[str, Any] = {"vocab_size": V + 3, "num_attention_heads": 2, **NO_DROPOUT}


def make_batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    ids, targets = (torch.randint(V, (2, LENGTH), generator=generator) for _ in range(2))
    targets[0, :3] = IGNORE_INDEX
    return {"input_ids": ids, "position_ids": torch.arange(LENGTH).expand(2, -1), "targets": targets}


def test_the_loss_in_training_is_the_divergence_from_the_teacher() -> None:
    temperature = TeacherTemperature(rho=math.log(V) - 3.0)
    loss_config = TemperatureLossConfig(name="ce", rho=1.0)
    student, teacher, batch = make_base("gpt2", **SIZES), make_base("gpt2", **SIZES, num_hidden_layers=2), make_batch()
    module = DistilledCausalLM(student, teacher, temperature, loss_config, **OPTIONS)
    output = module(**batch, with_statistics=True)
    arguments = {name: batch[name] for name in ("input_ids", "position_ids")}
    logits = [model(**arguments).logits[..., :V].flatten(0, 1) for model in (student, teacher)]
    counts = batch["targets"].flatten() != IGNORE_INDEX
    expected = teacher_divergence(*logits, output["tau"].flatten())[counts].mean()
    assert float(output["loss"]) == pytest.approx(float(expected), rel=1e-5)
    assert torch.allclose(output["tau"].flatten(), temperature.of(logits[1].detach()), rtol=1e-5)
    output["loss"].backward()
    assert all(parameter.grad is None for parameter in teacher.parameters())
    assert all(parameter.grad is not None for parameter in student.parameters())
    assert module.state_dict().keys() == TemperatureCausalLM(
        make_base("gpt2", **SIZES), None, loss_config, **OPTIONS
    ).state_dict().keys()  # fmt: skip

    plain = TemperatureCausalLM(student, None, loss_config, **OPTIONS)
    assert torch.equal(output["statistics"], plain(**batch, with_statistics=True)["statistics"])
    assert float(module.eval()(**batch)["loss"]) == pytest.approx(float(plain(**batch)["loss"]), rel=1e-6)
