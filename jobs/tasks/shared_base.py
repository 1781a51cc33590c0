"""Which runs can train their TempNets side by side on one frozen base, and the function that creates their task."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

from jobs.engine.config import OptimizerSection, TrainingConfig
from jobs.engine.identity import fixed_values
from jobs.engine.task import CreateTask, PreparedTask, Task
from jobs.tasks.language_model.config import LanguageModelConfig

_SHARED_OPTIMIZER = ("batch_size", "micro_batch_size")


def can_share_base(configs: Sequence[LanguageModelConfig]) -> bool:
    """Return whether runs can train side by side: on one frozen base, with the same data in the same order.

    They may differ in the temperature section and in the settings of the optimizer, except for the batch.
    """
    first, *others = configs
    networks_fit = all(
        config.model.is_frozen
        and config.temperature.transform
        and config.temperature.stop_gradient
        and not config.run.start_from
        for config in configs
    )
    return networks_fit and all(_shared(config) == _shared(first) for config in others)


def _shared(config: LanguageModelConfig) -> dict[str, Any]:
    own = {f"optimizer.{item.name}" for item in dataclasses.fields(OptimizerSection)}
    own -= {f"optimizer.{name}" for name in _SHARED_OPTIMIZER}
    return {
        name: value
        for name, value in fixed_values(config).items()
        if not name.startswith("temperature.") and name not in own and name != "run.name"
    }


def make_group_task(names: Sequence[str], prepared: Sequence[PreparedTask], config: TrainingConfig) -> CreateTask:
    """Return the function that creates the task of all members; see `jobs.engine.group_launch.train_group`."""
    arguments = [_arguments_of(task.create_task) for task in prepared]
    configs = [values[0] for values in arguments]
    run = dataclasses.replace(configs[0].run, name=config.run.name, storage=config.run.storage)
    group = dataclasses.replace(configs[0], run=run)
    return partial(_create_task, tuple(names), configs, group, arguments[0][1:])


def _arguments_of(create: Any) -> tuple[Any, ...]:
    """Return the arguments that `jobs.tasks.language_model.plan` has bound to its function `create_task`."""
    assert isinstance(create, partial)
    return create.args


def _create_task(
    names: tuple[str, ...],
    configs: Sequence[LanguageModelConfig],
    group: LanguageModelConfig,
    data: tuple[Any, ...],
    rank: int,
    world_size: int,
) -> Task:
    from jobs.tasks.language_model.plan import load_data
    from jobs.tasks.language_model.side_by_side import SideBySideTask

    group = group.with_num_workers(world_size)
    train, validation, base, features = load_data(*data)
    return SideBySideTask(group, train, validation, base, features, rank, world_size, names=names, configs=configs)
