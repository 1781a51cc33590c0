"""Tests which training steps of a task are observed to steer ρ, and how ρ moves after them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from jobs.engine.rho import ContrastiveSteering, RhoSteering
from jobs.engine.schedules import decay_with_warmup
from jobs.tasks.dual_encoder.task import ClipTask
from jobs.tasks.language_model.task import LanguageModelTask
from jobs.tasks.presets.clip import PRESETS as CLIP_PRESETS
from jobs.tasks.presets.language_models import PRESETS
from tempnet.softmax.fold import FoldCache
from tempnet.softmax.reference import TemperatureLossConfig

NUM_STEPS = 8
TAU, SLOPES = torch.tensor([[0.02, 0.03], [0.04, 0.02]]), torch.tensor([[0.5, -0.2], [0.1, 0.3]])


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


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


@pytest.mark.parametrize("rho_of", [rho_of_language_model, rho_of_clip])
def test_what_a_resting_tempnet_says_moves_no_rho(rho_of: Callable[[Engine], list[float]]) -> None:
    whole, rested = rho_of(Engine(rest_share=0.0)), rho_of(Engine(rest_share=0.5))
    assert len(set(whole)) == NUM_STEPS
    assert rested == [1.0] * 4 + whole[:4]
