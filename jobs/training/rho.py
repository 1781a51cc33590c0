"""ρ that a run steers by itself (`tempnet.rho_controller`): its settings, its state over the ranks and in checkpoints."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from jobs.training.config import TempNetSection, check_positive
from tempnet.contrastive.losses import ContrastiveLoss, ContrastiveOutput
from tempnet.rho_controller import RhoController

_STATE_FILE = "rho.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class SteeredTempNetSection(TempNetSection):
    """A TempNet whose ρ may be steered."""

    target_tau: float | None = None
    """Steer ρ during training so that the mean temperature goes to this and stays there; rho is then where it starts. For
    joint training, where the mean is a gauge. None: ρ stays as it is."""
    rho_gain: float = 1.0
    """κ: the nats by which ρ answers a mean temperature that is off by a factor of e."""

    def check_steering(self, *, has_learned_rho: bool, tau_min: float, tau_max: float) -> None:
        """Refuse a target that the loss cannot be steered to.

        Args:
            has_learned_rho: whether the loss is a robust one with a TempNet.

        Raises:
            ValueError: naming the field, the value and what is legal.
        """
        check_positive("temperature", self, "rho_gain")
        if self.target_tau is None:
            return
        if not has_learned_rho:
            raise ValueError(
                f"temperature.target_tau = {self.target_tau:g} steers the ρ of a robust loss with TempNets: choose "
                "temperature.loss dro (language models) or tempnet (contrastive), or None"
            )
        if not tau_min < self.target_tau < tau_max:
            raise ValueError(
                f"temperature.target_tau = {self.target_tau:g} must lie between τ₀ = {tau_min:g} and τ_max = {tau_max:g}"
            )


class RhoSteering:
    """The ρ of every step, the same on all ranks; without a target it stays where it starts.

    Args:
        limit: log K, below which ρ stays.
        apply: gives the loss another ρ.
    """

    def __init__(
        self, section: SteeredTempNetSection, *, rho: float, limit: float, apply: Callable[[float], None]
    ) -> None:
        self._controller: RhoController | None = None
        self._apply = apply
        if section.target_tau is not None:
            self._controller = RhoController(rho, target=section.target_tau, limit=limit, gain=section.rho_gain)

    @property
    def is_on(self) -> bool:
        """Whether there is a target."""
        return self._controller is not None

    def observe(self, tau: Tensor, excess: Tensor) -> None:
        """Take in a step and give the loss the ρ of the next one; all ranks must call it.

        Args:
            tau, excess: this rank's parts, whose sums over the ranks `RhoController.update` takes.
        """
        assert self._controller is not None
        parts = torch.stack([tau, excess]).detach().double()
        dist.all_reduce(parts)
        self._apply(self._controller.update(*parts.tolist()))

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

    def __init__(self, section: SteeredTempNetSection, loss: ContrastiveLoss, num_samples: int) -> None:
        def apply(rho: float) -> None:
            loss.config = replace(loss.config, rho=rho)

        super().__init__(section, rho=loss.config.rho, limit=math.log(max(2, num_samples - 1)), apply=apply)

    def observe_pairs(self, output: ContrastiveOutput) -> None:
        """Take in a step: the mean of its dual gradients, which are the f'(τ), is the excess of ρ."""
        gradient = output["dual_gradient"]
        if self.is_on and gradient is not None:
            num_ranks = dist.get_world_size()
            self.observe(output["tau"].mean() / num_ranks, gradient.mean() / num_ranks)
