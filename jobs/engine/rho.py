"""Adjusts ρ during training with a controller (`tempnet.controllers`) across ranks, and saves it in checkpoints."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from jobs.engine.temperature import ContrastiveSection, TempNetSection
from tempnet.contrastive.losses import ContrastiveLoss, ContrastiveOutput
from tempnet.controllers import RhoController

_STATE_FILE = "rho.json"


class RhoSteering:
    """Sets the ρ of every step, the same on all ranks; without a target for the mean temperature, ρ stays constant.

    Adjusting ρ costs one transfer from the device to the host per step.
    """

    def __init__(
        self,
        section: TempNetSection,
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

    def follows(self, optimizer: Optimizer, run: int = 0) -> bool:
        """Return whether to :meth:`observe` the coming step of a run: it has a target, and its TempNet does not rest.

        While its learning rate is 0, no ρ changes a temperature, and the controller's integral would grow to no
        purpose.
        """
        own = [group for group in optimizer.param_groups if group.get("run", 0) == run]
        return self._controller is not None and any(group["lr"] for group in own if group.get("name") == "tempnet")

    def observe(self, tau: Tensor, slope: Tensor) -> None:
        """Update ρ from the temperatures of a step, and set the loss's ρ for the next one. All ranks must call this.

        A temperature near an end of its range hardly responds to its slope, because τ is a sigmoid of the network's
        score s. Slopes are therefore averaged with the weights dτ/ds ∝ (τ − τ₀)(τ_max − τ), by which τ responds to the
        score; this weighted mean is the push on all scores.
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
        """Return the current ρ as a metric; empty if ρ is constant."""
        return {"rho": self._controller.rho} if self._controller else {}

    def save(self, directory: Path) -> None:
        """Write the controller's state into a checkpoint directory; every rank writes the same content."""
        if self._controller:
            (directory / _STATE_FILE).write_text(json.dumps(self._controller.state()))

    def load(self, directory: Path) -> None:
        """Restore the controller's state from a checkpoint directory, and set the loss's ρ."""
        if self._controller:
            self._controller.restore(json.loads((directory / _STATE_FILE).read_text()))
            self._apply(self._controller.rho)


class ContrastiveSteering(RhoSteering):
    """Adjusts the ρ of a contrastive loss, where K is the number of training samples minus one."""

    def __init__(self, section: ContrastiveSection, loss: ContrastiveLoss, num_samples: int) -> None:
        def apply(rho: float) -> None:
            loss.config = replace(loss.config, rho=rho)

        limit = math.log(max(2, num_samples - 1))
        super().__init__(section, rho=loss.config.rho, limit=limit, tau_range=section.tau_range, apply=apply)

    def observe_pairs(self, output: ContrastiveOutput) -> None:
        """Update ρ from the output of the loss, whose dual gradients are f'(τ); does nothing if it has none."""
        if (slope := output["dual_gradient"]) is not None:
            self.observe(output["tau"].flatten(), slope.flatten())
