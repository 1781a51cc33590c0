"""ρ that a run steers by itself (`tempnet.rho_controller`): over the ranks, and in checkpoints."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from deepspeed import DeepSpeedEngine
from torch import Tensor

from jobs.engine.config import SteeredTempNetSection
from jobs.engine.contrastive import ContrastiveSection
from tempnet.contrastive.losses import ContrastiveLoss, ContrastiveOutput
from tempnet.rho_controller import RhoController

_STATE_FILE = "rho.json"


class RhoSteering:
    """The ρ of every step, the same on all ranks; without a target it stays where it starts.

    A steered one costs a host read a step.

    Args:
        limit: log K, below which ρ stays.
        tau_range: τ₀ and τ_max.
        apply: gives the loss another ρ.
    """

    def __init__(
        self,
        section: SteeredTempNetSection,
        *,
        rho: float,
        limit: float,
        tau_range: tuple[float, float],
        apply: Callable[[float], None],
    ) -> None:
        self._controller: RhoController | None = None
        self._tau_range, self._apply = tau_range, apply
        if section.target_tau is not None:
            self._controller = RhoController(rho, target=section.target_tau, limit=limit, gain=section.rho_gain)

    def follows(self, engine: DeepSpeedEngine) -> bool:
        """Whether the coming step is one to :meth:`observe`: there is a target, and the TempNet learns.

        While it rests no ρ moves a temperature, and what the controller sums up would only have to be undone.
        """
        rates = [group["lr"] for group in engine.optimizer.param_groups if group.get("name") == "tempnet"]
        return self._controller is not None and any(rates)

    def observe(self, tau: Tensor, slope: Tensor) -> None:
        """Take in a step and give the loss the ρ of the next one; all ranks must call it.

        A temperature near an end of its range hardly follows its slope, as τ is a sigmoid of what the network adds up. So
        slopes count by how far τ moves with the score, dτ/ds ∝ (τ − τ₀)(τ_max − τ): their mean is what pushes all scores.

        Args:
            tau: (n,) of this rank's instances.
            slope: (n,) f'(τ) at the present ρ.
        """
        assert self._controller is not None
        low, high = self._tau_range
        tau, slope = tau.detach().double(), slope.detach().double()
        follows = (tau - low) * (high - tau) + 1e-6 * (high - low) ** 2
        sums = torch.stack([tau.sum(), tau.new_tensor(tau.numel()), (follows * slope).sum(), follows.sum()])
        dist.all_reduce(sums)
        total, count, push, weight = sums.tolist()
        if count:
            self._apply(self._controller.update(total / count, push / weight))

    def scores(self) -> dict[str, float]:
        """ρ, where it is steered."""
        return {"rho": self._controller.rho} if self._controller else {}

    def save(self, directory: Path) -> None:
        """Into a checkpoint; every rank writes the same."""
        if self._controller:
            (directory / _STATE_FILE).write_text(json.dumps(self._controller.state()))

    def load(self, directory: Path) -> None:
        """The inverse."""
        if self._controller:
            self._controller.restore(json.loads((directory / _STATE_FILE).read_text()))
            self._apply(self._controller.rho)


class ContrastiveSteering(RhoSteering):
    """Of a loss that compares pairs; K is the number of samples but one."""

    def __init__(self, section: ContrastiveSection, loss: ContrastiveLoss, num_samples: int) -> None:
        def apply(rho: float) -> None:
            loss.config = replace(loss.config, rho=rho)

        limit = math.log(max(2, num_samples - 1))
        super().__init__(section, rho=loss.config.rho, limit=limit, tau_range=section.tau_range, apply=apply)

    def observe_pairs(self, output: ContrastiveOutput) -> None:
        """Take in a step, whose dual gradients are the f'(τ)."""
        if (slope := output["dual_gradient"]) is not None:
            self.observe(output["tau"].flatten(), slope.flatten())
