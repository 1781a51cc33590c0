"""Presets: functions that return a complete configuration, named after the experiments of the papers.

Every preset has a small version (twin), which two CPU cores can run; the names of presets are recorded in MLflow.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from jobs.engine.config import RunSection, TrackingSection
from jobs.engine.fields import with_fields

Config = TypeVar("Config")

TWO_WORKERS = {
    "workers.num_workers": 2, "workers.cpus_per_worker": 0.5, "workers.use_gpu": False, "workers.zero_stage": 0,
}  # fmt: skip
"""The workers of a twin, which share two CPU cores with the readers of data.

Of so small a model there is nothing worth dividing, and every stage of ZeRO above 0 sends more messages in a step.
"""


def variant(base: Callable[[], Config], doc: str, changes: Mapping[str, Any]) -> Callable[[], Config]:
    """Return a preset that is another one with some fields changed; `doc` is its line of `--help`."""

    def preset() -> Config:
        return with_fields(base(), changes)

    preset.__doc__ = doc
    return preset


def twins_of(
    presets: Mapping[str, Callable[[], Config]],
    small: Callable[[Config], Config],
    data: str,
    *,
    aliases: Mapping[str, str] | None = None,
) -> dict[str, Callable[[], Config]]:
    """Return the twins of the presets, whose names end in `-small`; `small` converts a configuration into that of its twin.

    The help text says which `data` the twins use, and, by `aliases`, of which other preset the twin trains the same.
    """

    def twin_of(name: str, preset: Callable[[], Config]) -> Callable[[], Config]:
        def twin() -> Config:
            return small(preset())

        twin.__doc__ = f"Two cores, {data}: {(preset.__doc__ or '').strip()}"
        if aliases and name in aliases:
            twin.__doc__ = f"The same as {aliases[name]}-small under the name of {name}'s twin."
        return twin

    return {f"{name}-small": twin_of(name, preset) for name, preset in presets.items()}


def named(presets: Mapping[str, Callable[[], Config]]) -> dict[str, Callable[[], Config]]:
    """Return presets whose configurations have the name of the preset in `run.name` and `tracking.preset`."""

    def with_name(name: str, preset: Callable[[], Config]) -> Callable[[], Config]:
        return functools.wraps(preset)(lambda: _tagged(preset(), name))

    return {name: with_name(name, preset) for name, preset in presets.items()}


def _tagged(config: Any, preset: str) -> Any:
    """Set the preset's name in its sections, wherever they are nested: a sweep has them in its base configuration."""
    if isinstance(config, RunSection):
        return dataclasses.replace(config, name=preset)
    if isinstance(config, TrackingSection):
        return dataclasses.replace(config, preset=preset)
    sections = {item.name: getattr(config, item.name) for item in dataclasses.fields(config)}
    return dataclasses.replace(
        config, **{name: _tagged(value, preset) for name, value in sections.items() if dataclasses.is_dataclass(value)}
    )
