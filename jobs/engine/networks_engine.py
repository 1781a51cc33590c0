"""Trains several small networks side by side in the place of DeepSpeed, each with its own AdamW, schedule and clipping.

DeepSpeed has one gradient norm for everything that an engine trains. Networks that must be trained as if each were alone
need one each, and are too small for ZeRO to matter: a TempNet has megabytes. What the networks are after a step is to the
last bit what DeepSpeed would make of each (`jobs.engine.zero_layout`), with one or two workers on CPUs under ZeRO 1 or 2
and without accumulation over micro-batches; otherwise sums are added up in another order. The methods that the training
loop and the checkpoints call are those of `deepspeed.DeepSpeedEngine`.
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
from jobs.engine.zero_layout import FlatGroup, load_state_of_parameters, part_sizes, state_of_parameters

_FILE = "networks.pt"
# DeepSpeed adds it to the norm before it clips.
_EPSILON = 1e-6


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
        plans = [
            [
                part_sizes(
                    [*map(torch.numel, group["params"])],
                    zero_stage=config.workers.zero_stage,
                    num_workers=world_size,
                )
                for group in optimizer.param_groups
            ]
            for optimizer, config in zip(self.optimizers, configs, strict=True)
        ]
        totals = [sum(sizes) for plan in plans for sizes in plan]
        # All gradients lie in one piece of memory, which is added up over the workers where it is.
        self._gradients = torch.zeros(sum(totals), device=device)
        memory = iter(self._gradients.split(totals))
        self._groups = [
            [FlatGroup(group, sizes, next(memory)) for group, sizes in zip(optimizer.param_groups, plan, strict=True)]
            for optimizer, plan in zip(self.optimizers, plans, strict=True)
        ]
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
            dist.all_reduce(self._gradients)
            self._gradients.div_(self.dp_world_size)
        self.gradient_norms = []
        for groups, config, optimizer, scheduler in zip(
            self._groups, self.configs, self.optimizers, self.schedulers, strict=True
        ):
            norm = torch.linalg.vector_norm(torch.stack([group.gradient_norm() for group in groups]))
            self.gradient_norms.append(norm)
            if limit := config.optimizer.max_grad_norm:
                factor = 1.0 / ((norm + _EPSILON) / limit).clamp(min=1.0)
                for part in (part for group in groups for part in group.parts):
                    assert part.grad is not None
                    part.grad.mul_(factor)
            optimizer.step()
            scheduler.step()
        self._gradients.zero_()

    def save_checkpoint(self, directory: str, *, tag: str, **_: Any) -> None:
        """Write weights, optimizers and schedules; only the first worker writes, because all hold the same."""
        if dist.get_rank() != 0:
            return
        (Path(directory) / tag).mkdir()
        state = {
            "networks": [network.state_dict() for network in self.networks],
            "optimizers": [
                state_of_parameters(optimizer, groups)
                for optimizer, groups in zip(self.optimizers, self._groups, strict=True)
            ],
            "schedulers": [scheduler.state_dict() for scheduler in self.schedulers],
        }
        self.checkpoint_engine.save(state, str(Path(directory) / tag / _FILE))

    def load_checkpoint(self, directory: str, *, tag: str, **_: Any) -> None:
        """Load what :meth:`save_checkpoint` wrote, whatever number of workers wrote it."""
        state = self.checkpoint_engine.load(str(Path(directory) / tag / _FILE), map_location="cpu")
        for network, value in zip(self.networks, state["networks"], strict=True):
            network.load_state_dict(value)
        for optimizer, groups, value in zip(self.optimizers, self._groups, state["optimizers"], strict=True):
            load_state_of_parameters(optimizer, groups, value)
        for scheduler, value in zip(self.schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(value)
