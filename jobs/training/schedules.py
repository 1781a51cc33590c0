"""Learning-rate schedules, as factors of a group's own rate."""

from __future__ import annotations

import math
from collections.abc import Callable


def cosine_with_warmup(
    num_steps: int, *, warmup_share: float, final_share: float = 0.0, rest_share: float = 0.0
) -> Callable[[int], float]:
    """0 while it rests, linear up from there, then a half cosine down to `final_share` at `num_steps` (TempNet Table 5).

    Step s, counted from the end of the rest, has the factor (s + 1)/warm-up while it warms up, so that no step of the warm-up
    is wasted at rate 0. All shares are of `num_steps`.
    """
    num_rest, num_warmup = round(rest_share * num_steps), round(warmup_share * num_steps)
    num_cosine = max(1, num_steps - num_rest - num_warmup)

    def factor(step: int) -> float:
        step -= num_rest
        if step < 0:
            return 0.0
        if step < num_warmup:
            return (step + 1) / num_warmup
        progress = min(1.0, (step - num_warmup) / num_cosine)
        return final_share + (1.0 - final_share) * 0.5 * (1.0 + math.cos(math.pi * progress))

    return factor
