"""Tests of distillation: values and gradients are those of float64 autograd, teachers get the entropy that is asked for."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tempnet import distillation
from tempnet.distillation import TeacherTemperature, distillation_loss, teacher_divergence
from tempnet.softmax.reference import IGNORE_INDEX

V, D = 37, 5


def entropy(p: Tensor) -> Tensor:
    return -(p * p.clamp(min=1e-300).log()).sum(-1)


def make_case(num_tokens: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return contexts of student and teacher, their output weights, and targets of which every third is ignored."""
    generator = torch.Generator().manual_seed(seed)
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
@pytest.mark.parametrize("num_logits", [1 << 22, 4 * V, 1])
def test_loss_and_gradients_are_those_of_autograd_whatever_the_chunks(
    temperature: TeacherTemperature, num_logits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distillation, "_NUM_LOGITS_PER_CHUNK", num_logits)
    contexts, of_teacher, weight, of_teacher_weight, targets = make_case(11)
    leaves = [contexts.clone().requires_grad_(), weight.clone().requires_grad_()]
    result = distillation_loss(
        leaves[0], of_teacher, targets,
        student_logits=lambda rows: rows @ leaves[1].T, teacher_logits=lambda rows: rows @ of_teacher_weight.T,
        temperature=temperature, vocab_size=V,
    )  # fmt: skip
    gradients = torch.autograd.grad(result.loss, leaves)

    whole = [contexts.clone().requires_grad_(), weight.clone().requires_grad_()]
    p = torch.softmax(of_teacher @ of_teacher_weight.T / result.tau.unsqueeze(-1), -1)
    q = torch.softmax(whole[0] @ whole[1].T, -1)
    counts = targets != IGNORE_INDEX
    expected = ((p * (p / q).log()).sum(-1)[counts]).sum() / counts.sum()
    assert float(result.loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-10)
    for gradient, reference in zip(gradients, torch.autograd.grad(expected, whole), strict=True):
        torch.testing.assert_close(gradient, reference, rtol=1e-8, atol=1e-12)
    if temperature.rho is not None:
        assert entropy(p).tolist() == pytest.approx([2.5] * 11, abs=1e-5)
    else:
        assert result.tau.tolist() == [temperature.tau] * 11


def test_a_student_that_is_its_teacher_has_nothing_to_learn() -> None:
    logits = torch.randn(6, V, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    divergence = teacher_divergence(logits, logits, torch.ones(6))
    assert divergence.tolist() == pytest.approx([0.0] * 6, abs=1e-12)
    (gradient,) = torch.autograd.grad(divergence.sum(), logits)
    assert float(gradient.abs().max()) < 1e-12  # The teacher gets no gradient, and the student is at its minimum.


def test_the_sum_is_divided_by_the_number_that_is_given() -> None:
    contexts, of_teacher, weight, of_teacher_weight, targets = make_case(9)
    losses = [
        distillation_loss(
            contexts, of_teacher, targets, student_logits=lambda rows: rows @ weight.T,
            teacher_logits=lambda rows: rows @ of_teacher_weight.T, temperature=TeacherTemperature(tau=1.0), vocab_size=V,
            num_targets=number,
        ).loss
        for number in (None, 12.0)
    ]  # fmt: skip
    assert float(losses[0]) * 6 == pytest.approx(float(losses[1]) * 12)
    ignored = distillation_loss(
        contexts, of_teacher, torch.full_like(targets, IGNORE_INDEX), student_logits=lambda rows: rows @ weight.T,
        teacher_logits=lambda rows: rows @ of_teacher_weight.T, temperature=TeacherTemperature(tau=1.0), vocab_size=V,
    )  # fmt: skip
    assert float(ignored.loss) == 0.0


@pytest.mark.parametrize("values", [{}, {"rho": 1.0, "tau": 1.0}])
def test_a_temperature_is_constant_or_gives_a_constant_entropy(values: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="give one of them"):
        TeacherTemperature(**values)
    with pytest.raises(ValueError, match="tau = 0 must be positive"):
        TeacherTemperature(tau=0.0)
