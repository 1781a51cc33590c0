"""Tests of parameters in one piece of memory: updates, norms and states are those of AdamW on the parameters themselves."""

from __future__ import annotations

import copy
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

from jobs.engine.zero_layout import FlatGroup, load_state_of_parameters, part_sizes, state_of_parameters

SHAPES = [[(7, 5), (3, 33)], [(), (13,), (1,), (32,)]]


def make_parameters() -> list[list[nn.Parameter]]:
    torch.manual_seed(0)
    return [[nn.Parameter(torch.randn(shape)) for shape in group] for group in SHAPES]


def make_optimizer(groups: list[list[nn.Parameter]]) -> AdamW:
    decays = (0.1, 0.0)
    settings = [
        {"params": group, "weight_decay": decay, "name": "tempnet"} for group, decay in zip(groups, decays, strict=True)
    ]
    return AdamW(settings, lr=1e-2, fused=True)


def flatten(optimizer: AdamW, *, zero_stage: int, num_workers: int) -> list[FlatGroup]:
    found = []
    for group in optimizer.param_groups:
        sizes = part_sizes([value.numel() for value in group["params"]], zero_stage=zero_stage, num_workers=num_workers)
        found.append(FlatGroup(group, sizes, torch.zeros(sum(sizes))))
    return found


def set_gradients(groups: list[list[nn.Parameter]], seed: int) -> None:
    """Write gradients where the flat groups have them, or set them."""
    torch.manual_seed(seed)
    for parameter in (parameter for group in groups for parameter in group):
        gradient = torch.randn_like(parameter) * 1e-3
        if parameter.grad is None:
            parameter.grad = gradient
        else:
            parameter.grad.copy_(gradient)


@pytest.mark.parametrize("num_workers", [1, 2, 3, 8])
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_a_flat_group_is_updated_as_its_parameters_are(zero_stage: int, num_workers: int) -> None:
    flat, plain = make_parameters(), make_parameters()
    optimizers = make_optimizer(flat), make_optimizer(plain)
    groups = flatten(optimizers[0], zero_stage=zero_stage, num_workers=num_workers)
    for step in range(20):
        set_gradients(flat, step)
        set_gradients(plain, step)
        for group, parameters in zip(groups, plain, strict=True):
            gradients = [value.grad.flatten().double() for value in parameters if value.grad is not None]
            torch.testing.assert_close(group.gradient_norm().double(), torch.cat(gradients).norm(), rtol=1e-6, atol=0)
        for optimizer in optimizers:
            optimizer.step()
    for ours, theirs in zip(chain.from_iterable(flat), chain.from_iterable(plain), strict=True):
        assert ours.shape == theirs.shape
        if zero_stage in (0, 3):
            assert torch.equal(ours, theirs)
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("writers", "readers"), [(1, 2), (2, 1), (3, 3), (2, 5)])
def test_the_state_is_that_of_the_parameters_whatever_the_number_of_workers(writers: int, readers: int) -> None:
    written, plain = make_parameters(), make_parameters()
    optimizers = make_optimizer(written), make_optimizer(plain)
    groups = flatten(optimizers[0], zero_stage=2, num_workers=writers)
    assert state_of_parameters(optimizers[0], groups)["state"] == {}
    for parameters, optimizer in zip((written, plain), optimizers, strict=True):
        set_gradients(parameters, 1)
        optimizer.step()
    state, expected = state_of_parameters(optimizers[0], groups), optimizers[1].state_dict()
    assert state["param_groups"] == expected["param_groups"]
    assert state["state"].keys() == expected["state"].keys()
    for number, values in expected["state"].items():
        for name, value in values.items():
            assert state["state"][number][name].shape == value.shape
            torch.testing.assert_close(state["state"][number][name], value, rtol=1e-5, atol=1e-9)
    read = [[nn.Parameter(value.detach().clone()) for value in group] for group in written]
    optimizer = make_optimizer(read)
    others = flatten(optimizer, zero_stage=2, num_workers=readers)
    load_state_of_parameters(optimizer, others, copy.deepcopy(state))
    assert_equal_states(state_of_parameters(optimizer, others), state)
    for parameters, own in ((written, optimizers[0]), (read, optimizer)):
        set_gradients(parameters, 2)
        own.step()
    for ours, theirs in zip(chain.from_iterable(read), chain.from_iterable(written), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def assert_equal_states(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours["param_groups"] == theirs["param_groups"]
    own: dict[int, dict[str, Tensor]] = ours["state"]
    assert own.keys() == theirs["state"].keys()
    assert all(
        torch.equal(value, theirs["state"][k][name]) for k, values in own.items() for name, value in values.items()
    )


def test_parts_are_equal_and_padded() -> None:
    assert part_sizes([256, 1, 1, 256], zero_stage=2, num_workers=2) == [258, 258]
    assert part_sizes([256, 1, 1, 256], zero_stage=1, num_workers=1) == [514]
    assert part_sizes([16, 1, 1, 32], zero_stage=2, num_workers=2) == [26, 26]
    assert part_sizes([16, 1, 1, 32], zero_stage=0, num_workers=2) == [16, 1, 1, 32]
