"""Test what changes in the course of a training, the learning rate and ρ, and that the network gets what its section says."""

from __future__ import annotations

import dataclasses
import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from jobs.engine.deepspeed_engine import decay_with_warmup, keeping_settings
from jobs.engine.task import RhoSteering
from jobs.tasks.config import ContrastiveSection
from jobs.tasks.language_model.config import TemperatureSection


def test_the_learning_rate_warms_up_and_decays() -> None:
    factor = decay_with_warmup(1000, warmup_share=0.1, final_share=0.2)
    assert [factor(step) for step in (0, 49, 99, 100)] == pytest.approx([0.01, 0.5, 1.0, 1.0])
    assert [factor(step) for step in (550, 1000)] == pytest.approx([0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi / 2)), 0.2])
    values = [factor(step) for step in range(100, 1001)]
    assert all(later < earlier for earlier, later in itertools.pairwise(values))
    without = decay_with_warmup(10, warmup_share=0.0)
    assert (without(0), without(10)) == pytest.approx((1.0, 0.0))
    triangle = decay_with_warmup(1000, decay="linear", warmup_share=0.1, final_share=0.1)
    assert [triangle(step) for step in (49, 99, 100, 550, 1000)] == pytest.approx([0.5, 1.0, 1.0, 0.55, 0.1])


def test_a_rest_comes_before_the_warm_up() -> None:
    factor = decay_with_warmup(1000, warmup_share=0.1, rest_share=0.2)
    assert {factor(step) for step in range(200)} == {0.0}
    assert [factor(step) for step in (200, 249, 299, 650, 1000)] == pytest.approx([0.01, 0.5, 1.0, 0.5, 0.0])


@pytest.mark.parametrize("step", [1, 10])
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


def test_no_rho_follows_a_tempnet_that_rests() -> None:
    """The controller's integral would grow while the learning rate is 0, so that ρ would leap at the end of the rest."""
    steering = RhoSteering(target=0.5, gain=5.0, rho=1.0, limit=7.0, tau_range=(0.001, 2.0), apply=print)
    optimizer = AdamW([{"name": "tempnet", "params": [nn.Parameter(torch.ones(()))]}], lr=0.1)
    schedule = LambdaLR(optimizer, decay_with_warmup(8, warmup_share=0.0, rest_share=0.5))
    found = []
    for _ in range(8):
        found.append(steering.follows(optimizer))
        optimizer.step()
        schedule.step()
    assert found == [False] * 4 + [True] * 4


def test_every_option_of_the_section_temperature_reaches_the_network() -> None:
    sizes = {"hidden_size": 8, "num_prototypes": 4, "phi_init": 0.5, "tau_min": 0.2, "tau_max": 0.9}
    switches = dict.fromkeys(("normalize_input", "transform", "projection", "stop_gradient"), False)
    changed: dict[str, Any] = {**sizes, **switches, "pooling": "linear"}
    network = dataclasses.asdict(TemperatureSection(rho=2.0, **changed).network_config(100, 3.0, 8))
    assert {name: network[name] for name in changed} == changed
    assert (network["rho"], network["input_size"]) == (3.0, 100)
    section = ContrastiveSection(loss="tempnet", rho=2.0, **changed)
    network = dataclasses.asdict(section.network_config(16))
    assert {name: network[name] for name in changed} == changed
    assert network["rho"] == 2.0
    assert (section.loss_config.rho, section.loss_config.tau_max) == (2.0, 0.9)


def test_rho_is_adjusted_after_the_checkpoint_of_a_run_whose_rho_was_constant(tmp_path: Path) -> None:
    steering = RhoSteering(target=0.5, gain=5.0, rho=1.0, limit=7.0, tau_range=(0.001, 2.0), apply=print)
    steering.load(tmp_path)
    assert steering.scores() == {"rho": 1.0}
