"""Learning-rate schedules, as factors of a group's own rate."""

from __future__ import annotations

import math
from collections.abc import Callable


def cosine_with_warmup(num_steps: int, *, warmup_share: float, final_share: float = 0.0) -> Callable[[int], float]:
    """Linear from 0 over the first steps, then a half cosine down to `final_share` at `num_steps` (TempNet Table 5).

    Step s, counted from 0, has the factor (s + 1)/warm-up while it warms up, so that no step is wasted at rate 0.
    """
    num_warmup = round(warmup_share * num_steps)

    def factor(step: int) -> float:
        if step < num_warmup:
            return (step + 1) / num_warmup
        progress = min(1.0, (step - num_warmup) / max(1, num_steps - num_warmup))
        return final_share + (1.0 - final_share) * 0.5 * (1.0 + math.cos(math.pi * progress))

    return factor
