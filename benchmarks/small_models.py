"""Train a small model in a minute, as `benchmarks.promise` and `benchmarks.rewards` do."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler


def minimise(
    loss: Callable[[], Tensor],
    model: nn.Module,
    schedule: Callable[[torch.optim.Optimizer], LRScheduler],
    *,
    num_steps: int,
    rate: float,
    beta2: float = 0.999,
    weight_decay: float = 0.01,
) -> float:
    """Minimise a loss, which is drawn anew in every step, with AdamW; return its mean over the last tenth of the steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=weight_decay, betas=(0.9, beta2))
    scheduler = schedule(optimizer)
    losses = []
    model.train()
    for _ in range(num_steps):
        value = loss()
        optimizer.zero_grad()
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        losses.append(value.item())
    model.eval()
    return float(np.mean(losses[-max(1, num_steps // 10) :]))
