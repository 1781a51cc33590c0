"""Which runs can train their networks side by side on one frozen base."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jobs.engine.config import OptimizerSection, TrainingConfig
from jobs.engine.identity import fixed_values

_SHARED_OPTIMIZER = ("batch_size", "micro_batch_size")


def can_share_base(configs: Sequence[TrainingConfig]) -> bool:
    """Return whether runs can train side by side: on one frozen base, with the same data in the same order.

    They may differ in the temperature section and in the settings of the optimizer, except for the batch.
    """
    first, *others = configs
    networks_fit = all(config.trains_networks_alone and not config.run.start_from for config in configs)
    return networks_fit and all(_shared(config) == _shared(first) for config in others)


def _shared(config: TrainingConfig) -> dict[str, Any]:
    own = {f"optimizer.{item.name}" for item in dataclasses.fields(OptimizerSection)}
    own -= {f"optimizer.{name}" for name in _SHARED_OPTIMIZER}
    return {
        name: value
        for name, value in fixed_values(config).items()
        if not name.startswith("temperature.") and name not in own and name != "run.name"
    }
