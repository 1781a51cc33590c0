"""Tests that the learning-rate schedule follows its description."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from jobs.engine.schedules import decay_with_warmup, keeping_settings


def test_warm_up_is_linear_and_the_cosine_ends_at_its_share() -> None:
    factor = decay_with_warmup(1000, warmup_share=0.1, final_share=0.2)
    assert [factor(step) for step in (0, 49, 99)] == pytest.approx([0.01, 0.5, 1.0])
    assert factor(100) == pytest.approx(1.0)
    assert factor(550) == pytest.approx(0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi / 2)))
    assert factor(1000) == pytest.approx(0.2)
    values = [factor(step) for step in range(100, 1001)]
    assert all(later < earlier for earlier, later in itertools.pairwise(values))


def test_no_warm_up() -> None:
    factor = decay_with_warmup(10, warmup_share=0.0)
    assert factor(0) == 1.0
    assert factor(10) == pytest.approx(0.0)


def test_a_rest_comes_before_the_warm_up() -> None:
    factor = decay_with_warmup(1000, warmup_share=0.1, rest_share=0.2)
    assert {factor(step) for step in range(200)} == {0.0}
    assert [factor(step) for step in (200, 249, 299)] == pytest.approx([0.01, 0.5, 1.0])
    assert factor(650) == pytest.approx(0.5)
    assert factor(1000) == pytest.approx(0.0)


def test_a_slanted_triangle() -> None:
    factor = decay_with_warmup(1000, decay="linear", warmup_share=0.1, final_share=0.1)
    assert [factor(step) for step in (49, 99, 100, 550, 1000)] == pytest.approx([0.5, 1.0, 1.0, 0.55, 0.1])


@pytest.mark.parametrize("step", [1, 4, 10, 19])
def test_a_checkpoint_of_another_run_leaves_the_settings_as_they_are(step: int) -> None:
    """The optimizer that loads goes on as one would that had its own settings and the moments of the other from the start."""

    def make(rate: float, decay: float) -> tuple[nn.Linear, AdamW, LambdaLR]:
        module = nn.Linear(3, 2)
        groups = [{"params": [parameter]} for parameter in module.parameters()]
        optimizer = AdamW(groups, lr=rate, weight_decay=decay)
        return module, optimizer, LambdaLR(optimizer, decay_with_warmup(20, warmup_share=0.2))

    def train(module: nn.Linear, optimizer: AdamW, schedule: LambdaLR) -> None:
        optimizer.zero_grad()
        module(torch.ones(3)).square().sum().backward()
        optimizer.step()
        schedule.step()

    _, optimizer, schedule = other = make(1e-2, 0.1)
    for _ in range(step):
        train(*other)
    _, loaded, loaded_schedule = mine = make(3e-3, 0.2)
    with keeping_settings(loaded, loaded_schedule):
        loaded.load_state_dict(optimizer.state_dict())
        loaded_schedule.load_state_dict(schedule.state_dict())
    for group, at_other in zip(loaded.param_groups, optimizer.param_groups, strict=True):
        assert (group["initial_lr"], group["weight_decay"]) == (3e-3, 0.2)
        assert group["lr"] == 3e-3 * decay_with_warmup(20, warmup_share=0.2)(step)
        assert at_other["lr"] == 1e-2 * decay_with_warmup(20, warmup_share=0.2)(step)
    assert [state["step"] for state in loaded.state.values()] == [step, step]
    train(*mine)
    assert loaded.param_groups[0]["lr"] == 3e-3 * decay_with_warmup(20, warmup_share=0.2)(step + 1)
