"""Tests that the losses and gradients of networks side by side are those of each network alone, also in float64."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from tempnet import TempNet, TempNetConfig
from tempnet.softmax.fold import FoldCache
from tempnet.softmax.linear import linear_language_model_loss
from tempnet.softmax.reference import IGNORE_INDEX, TemperatureLossConfig, language_model_loss
from tempnet.softmax.side_by_side import Member, side_by_side_losses

V, D, N = 50, 6, 23


def make_members(dtype: torch.dtype = torch.float32) -> list[Member]:
    """Return networks that differ in loss, ρ, τ_max, shift, norm, depth, pooling and initial weights."""
    options: list[dict[str, Any]] = [
        {},
        {"rho": 2.5, "tau_max": 1.5},
        {"input_shift": "mean"},
        {"input_shift": "max", "hidden_size": 7},
        {"input_shift": "mean", "normalize_input": False},
        {"depth": 4, "pooling": "linear"},
    ]
    members = []
    for number, (option, loss) in enumerate(zip(options, itertools.cycle(("dro", "dro", "ts_ce")), strict=False)):
        torch.manual_seed(number)
        config = TempNetConfig.for_logits(V, **{"rho": 1.0, "hidden_size": 5, "num_prototypes": 4, **option})
        loss_config = TemperatureLossConfig(name=loss, rho=config.rho, tau_max=config.tau_max)
        members.append(Member(config=loss_config, tempnet=TempNet(config).to(dtype), fold_cache=FoldCache()))
    return members


def inputs(dtype: torch.dtype, num_tokens: int = N) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    hidden, weight = torch.randn(num_tokens, D, dtype=dtype), torch.randn(V + 3, D, dtype=dtype)
    targets = torch.randint(V, (num_tokens,))
    targets[::5] = IGNORE_INDEX
    return hidden, weight, targets


@pytest.mark.parametrize("chunk_size", [None, 4])
@pytest.mark.parametrize("extra", [{}, {"bias": True}, {"soft_cap": 3.0}])
def test_each_network_is_trained_as_if_it_were_alone(chunk_size: int | None, extra: dict[str, Any]) -> None:
    hidden, weight, targets = inputs(torch.float64)
    if extra.get("bias"):
        extra = {"bias": torch.randn(len(weight), dtype=torch.float64)}
    members, alone = make_members(torch.float64), make_members(torch.float64)
    losses = side_by_side_losses(
        hidden, weight, targets, members,
        num_targets=7.0, gradient_scale=1 / 7, vocab_size=V, with_values=True, chunk_size=chunk_size, **extra,
    )  # fmt: skip
    for member, same, found in zip(members, alone, losses, strict=True):
        expected = linear_language_model_loss(
            hidden, weight, targets, same.config, same.tempnet,
            num_targets=7.0, vocab_size=V, with_values=True, chunk_size=chunk_size, **extra,
        )  # fmt: skip
        expected.loss.backward()
        torch.testing.assert_close(found.loss, expected.loss.detach())
        torch.testing.assert_close(found.tau, expected.tau)
        torch.testing.assert_close(found.slopes, expected.slopes)
        assert found.values is not None
        assert expected.values is not None
        for ours, theirs in zip(found.values, expected.values, strict=True):
            torch.testing.assert_close(ours, theirs)
        for ours, theirs in zip(member.tempnet.parameters(), same.tempnet.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-9, atol=1e-12)


def test_the_gradients_are_those_of_autograd_through_all_logits() -> None:
    hidden, weight, targets = inputs(torch.float64)
    members, alone = make_members(torch.float64), make_members(torch.float64)
    num_targets = int((targets != IGNORE_INDEX).sum())
    losses = side_by_side_losses(
        hidden, weight, targets, members, num_targets=num_targets, gradient_scale=1 / num_targets, vocab_size=V
    )
    for member, same, found in zip(members, alone, losses, strict=True):
        logits = hidden @ weight[:V].T
        expected, _ = language_model_loss(logits, targets, same.config, same.tempnet, num_targets=num_targets)
        expected.backward()
        assert math.isclose(float(found.loss), expected.item(), rel_tol=1e-10)
        for ours, theirs in zip(member.tempnet.parameters(), same.tempnet.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize("num_tokens", [23, 400])  # too few for the fold to pay, and enough
@pytest.mark.parametrize("extra", [{}, {"bias": True}, {"soft_cap": 3.0}])
def test_everything_is_that_of_each_network_alone_to_the_last_bit(num_tokens: int, extra: dict[str, Any]) -> None:
    hidden, weight, targets = inputs(torch.float32, num_tokens)
    options = {**extra, "vocab_size": V, "with_values": True}
    if extra.get("bias"):
        options["bias"] = torch.randn(len(weight))
    members, alone = make_members(), make_members()
    num_targets = 3.0
    for part in (slice(0, num_tokens // 2), slice(num_tokens // 2, num_tokens)):  # micro-batches
        losses = side_by_side_losses(
            hidden[part], weight, targets[part], members,
            num_targets=num_targets, gradient_scale=1 / num_targets, **options,
        )  # fmt: skip
        for same, found in zip(alone, losses, strict=True):
            expected = linear_language_model_loss(
                hidden[part], weight, targets[part], same.config, same.tempnet,
                num_targets=num_targets, **options,
            )  # fmt: skip
            expected.loss.backward()
            assert found.values is not None
            assert expected.values is not None
            ours, theirs = (
                (result.loss.detach(), result.tau, result.slopes, *result.values) for result in (found, expected)
            )
            assert all(map(torch.equal, ours, theirs))
    for member, same in zip(members, alone, strict=True):
        for own, other in zip(member.tempnet.parameters(), same.tempnet.parameters(), strict=True):
            assert own.grad is not None
            assert other.grad is not None
            assert torch.equal(own.grad, other.grad)


def test_gradients_are_only_written_when_asked_for() -> None:
    hidden, weight, targets = inputs(torch.float32)
    members = make_members()
    side_by_side_losses(hidden, weight, targets, members, num_targets=1.0, vocab_size=V)
    assert all(parameter.grad is None for member in members for parameter in member.tempnet.parameters())
    side_by_side_losses(hidden, weight, targets, members, num_targets=1.0, gradient_scale=1.0, vocab_size=V)
    assert all(parameter.grad is not None for member in members for parameter in member.tempnet.parameters())
