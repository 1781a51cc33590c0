"""Learning-rate schedules, expressed as factors of a parameter group's own learning rate."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

from torch.optim.lr_scheduler import LambdaLR


def decay_with_warmup(
    num_steps: int,
    *,
    decay: Literal["cosine", "linear"] = "cosine",
    warmup_share: float,
    final_share: float = 0.0,
    rest_share: float = 0.0,
) -> Callable[[int], float]:
    """Return a schedule: factor 0 during the rest, a linear warm-up to 1, then a decay to `final_share` at `num_steps`.

    The decay is half a cosine (TempNet Table 5) or linear (the slanted triangle of arXiv 1801.06146, as in DeCLUTR). In
    the warm-up, step s, counted from the end of the rest, has the factor (s + 1)/(number of warm-up steps), so that no
    step of the warm-up is wasted at a learning rate of 0.

    Args:
        num_steps: number of optimizer steps of the run.
        decay: shape of the decay.
        warmup_share: length of the warm-up as a share of `num_steps`.
        final_share: factor at the end of the decay.
        rest_share: length of the rest as a share of `num_steps`.
    """
    num_rest, num_warmup = round(rest_share * num_steps), round(warmup_share * num_steps)
    num_decay = max(1, num_steps - num_rest - num_warmup)

    def factor(step: int) -> float:
        step -= num_rest
        if step < 0:
            return 0.0
        if step < num_warmup:
            return (step + 1) / num_warmup
        progress = min(1.0, (step - num_warmup) / num_decay)
        left = 1.0 - progress if decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
        return final_share + (1.0 - final_share) * left

    return factor


@contextmanager
def keeping_settings(optimizer: Any, schedule: LambdaLR) -> Iterator[None]:
    """Keep learning rates, weight decay and all other settings while the block loads moments and the schedule's step.

    A checkpoint holds the settings of the run that wrote it, which may be another run (`run.start_from`). The rates are
    those of the schedule's step, which PyTorch sets only after the next one.

    Args:
        optimizer: a PyTorch optimizer, or one of DeepSpeed's, with `param_groups`.
        schedule: its schedule.
    """
    settings = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    peaks = list(schedule.base_lrs)
    yield
    schedule.base_lrs = peaks
    rates = [peak * factor(schedule.last_epoch) for peak, factor in zip(peaks, schedule.lr_lambdas, strict=True)]
    for group, own, rate in zip(optimizer.param_groups, settings, rates, strict=True):
        group.update(own, lr=rate)
