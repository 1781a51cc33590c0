"""Test what changes in the course of a training, the learning rate and ρ, and that the network gets what its section says."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from jobs.engine.contrastive import ContrastiveSection
from jobs.engine.deepspeed_engine import decay_with_warmup, keeping_settings
from jobs.engine.rho import ContrastiveSteering, RhoSteering
from jobs.tasks.dual_encoder.task import ClipTask
from jobs.tasks.language_model.config import TemperatureSection
from jobs.tasks.language_model.task import LanguageModelTask
from jobs.tasks.presets.clip import PRESETS as CLIP_PRESETS
from jobs.tasks.presets.language_models import PRESETS
from tempnet.softmax.config import TemperatureLossConfig
from tempnet.softmax.fold import FoldCache


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


NUM_STEPS = 8
TAU, SLOPES = torch.tensor([[0.02, 0.03], [0.04, 0.02]]), torch.tensor([[0.5, -0.2], [0.1, 0.3]])


class Engine:
    """This is the part of DeepSpeed's engine that a task uses; its model returns the same output at every step."""

    device = torch.device("cpu")

    def __init__(self, rest_share: float) -> None:
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.optimizer = torch.optim.AdamW([{"name": "tempnet", "params": [self.weight]}], lr=0.1)
        factor = decay_with_warmup(NUM_STEPS, warmup_share=0.0, rest_share=rest_share)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, factor)

    def __call__(self, **_: Any) -> dict[str, Any]:
        loss = self.weight.square()
        return {"loss": loss, "tau": TAU, "slopes": SLOPES, "dual_gradient": SLOPES, "log_u": None, "statistics": None}

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        self.optimizer.step()
        self.scheduler.step()


def rho_of_language_model(engine: Any) -> list[float]:
    """Returns ρ after every step of training a language model."""
    config = PRESETS["gpt2-scratch-small"]()
    config = replace(config, temperature=replace(config.temperature, target_tau=0.02))
    module = SimpleNamespace(fold_cache=FoldCache(), loss_config=TemperatureLossConfig(name="dro", rho=1.0))
    task: Any = SimpleNamespace(config=config, world_size=2, module=module)

    def apply(rho: float) -> None:
        module.loss_config = replace(module.loss_config, rho=rho)

    task.steering = RhoSteering(config.temperature, rho=1.0, limit=7.0, tau_range=(0.001, 2.0), apply=apply)
    batch = {name: np.zeros(TAU.shape, dtype=np.int64) for name in ("input_ids", "position_ids", "targets")}
    history = []
    for step in range(NUM_STEPS):
        LanguageModelTask.train_step(task, engine, batch, step=step, num_units=16, with_statistics=False)
        history.append(module.loss_config.rho)
    return history


def rho_of_clip(engine: Any) -> list[float]:
    """Returns ρ after every step of contrastive training."""
    config = CLIP_PRESETS["clip-cc3m-tempnet-small"]()
    config = replace(config, temperature=replace(config.temperature, rho=1.0, target_tau=0.02))
    loss: Any = SimpleNamespace(config=config.temperature.loss_config)
    steering = ContrastiveSteering(config.temperature, loss, num_samples=1000)
    task: Any = SimpleNamespace(config=config, world_size=2, loss_config=loss.config, steering=steering)
    task._tensors = lambda batch, device: {}
    history = []
    for step in range(NUM_STEPS):
        ClipTask.train_step(task, engine, {}, step=step, num_units=2, with_statistics=False)
        history.append(loss.config.rho)
    return history


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("rho_of", [rho_of_language_model, rho_of_clip])
def test_what_a_resting_tempnet_says_moves_no_rho(rho_of: Callable[[Engine], list[float]]) -> None:
    whole, rested = rho_of(Engine(rest_share=0.0)), rho_of(Engine(rest_share=0.5))
    assert len(set(whole)) == NUM_STEPS
    assert rested == [1.0] * 4 + whole[:4]


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
