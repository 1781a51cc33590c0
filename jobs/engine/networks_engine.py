"""Trains several small networks side by side in the place of DeepSpeed, each with its own AdamW, schedule and clipping.

DeepSpeed has one gradient norm for everything that an engine trains. Networks that must be trained as if each were alone
need one each, and are too small for ZeRO to matter: a TempNet has megabytes. Weights and losses are those of runs alone but
for the rounding of sums. The methods that the training loop and the checkpoints call are those of
`deepspeed.DeepSpeedEngine`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from jobs.engine.checkpoint import SafeCheckpointEngine
from jobs.engine.config import TrainingConfig
from jobs.engine.deepspeed_engine import make_optimizer

_FILE = "networks.pt"


class NetworksEngine:
    """Networks with their optimizers.

    Args:
        module: holds everything that is run, among it the networks.
        networks: the networks that are trained.
        configs: the configuration of every network; its optimizer section is used.
        device: where everything is computed.
        world_size: number of workers.
    """

    def __init__(
        self,
        module: nn.Module,
        networks: Sequence[nn.Module],
        configs: Sequence[TrainingConfig],
        *,
        device: torch.device,
        world_size: int,
    ) -> None:
        self.module = module.to(device)
        self.networks, self.configs, self.device, self.dp_world_size = networks, configs, device, world_size
        self.checkpoint_engine = SafeCheckpointEngine()
        pairs = [
            make_optimizer(
                [
                    {
                        "name": "tempnet",
                        "parameters": list(network.parameters()),
                        "learning_rate": config.optimizer.learning_rate_tempnet,
                    }
                ],
                config,
            )
            for network, config in zip(networks, configs, strict=True)
        ]
        self.optimizers = [optimizer for optimizer, _ in pairs]
        self.schedulers = [scheduler for _, scheduler in pairs]
        for network in networks:
            for parameter in network.parameters():
                parameter.grad = torch.zeros_like(parameter)
        self.gradient_norms: list[torch.Tensor] = []
        """L2 norm of the gradient of every network in the last step, before clipping."""

    def zero_optimization(self) -> bool:
        """Return False: nothing is divided among workers."""
        return False

    def train(self, mode: bool = True) -> None:
        """Set the mode of the module."""
        self.module.train(mode)

    def eval(self) -> None:
        """Set the module to eval mode."""
        self.module.eval()

    def step(self) -> None:
        """Average the gradients over the workers, clip those of every network by themselves, and update the weights."""
        if self.dp_world_size > 1:
            self._average_gradients()
        self.gradient_norms = [
            nn.utils.clip_grad_norm_(network.parameters(), config.optimizer.max_grad_norm or float("inf"))
            for network, config in zip(self.networks, self.configs, strict=True)
        ]
        for optimizer, scheduler in zip(self.optimizers, self.schedulers, strict=True):
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            scheduler.step()

    def _average_gradients(self) -> None:
        """Average all gradients over the workers, in one message."""
        gradients = [parameter.grad for network in self.networks for parameter in network.parameters()]
        joined = torch.cat([gradient.flatten() for gradient in gradients if gradient is not None])
        dist.all_reduce(joined)
        joined.div_(self.dp_world_size)
        nn.utils.vector_to_parameters(joined, [gradient for gradient in gradients if gradient is not None])

    def save_checkpoint(self, directory: str, *, tag: str, **_: Any) -> None:
        """Write weights, optimizers and schedules; only the first worker writes, because all hold the same."""
        if dist.get_rank() != 0:
            return
        (Path(directory) / tag).mkdir()
        state = {
            "networks": [network.state_dict() for network in self.networks],
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "schedulers": [scheduler.state_dict() for scheduler in self.schedulers],
        }
        self.checkpoint_engine.save(state, str(Path(directory) / tag / _FILE))

    def load_checkpoint(self, directory: str, *, tag: str, **_: Any) -> None:
        """Load what :meth:`save_checkpoint` wrote, whatever number of workers wrote it."""
        state = self.checkpoint_engine.load(str(Path(directory) / tag / _FILE), map_location="cpu")
        for network, value in zip(self.networks, state["networks"], strict=True):
            network.load_state_dict(value)
        for optimizer, value in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(value)
        for scheduler, value in zip(self.schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(value)
