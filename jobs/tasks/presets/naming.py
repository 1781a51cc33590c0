"""Presets that know their names: every run that is made from one says so in MLflow."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from jobs.engine.config import TrackingSection

Config = TypeVar("Config")


def named(presets: Mapping[str, Callable[[], Config]]) -> dict[str, Callable[[], Config]]:
    """The presets, with their names in `tracking.preset` of their configurations."""

    def with_name(name: str, preset: Callable[[], Config]) -> Callable[[], Config]:
        @functools.wraps(preset)
        def configuration() -> Config:
            return _tagged(preset(), name)

        return configuration

    return {name: with_name(name, preset) for name, preset in presets.items()}


def _tagged(config: Any, preset: str) -> Any:
    """The configuration with the preset's name in its tracking section, wherever that is: a sweep's is in its base."""
    if isinstance(config, TrackingSection):
        return dataclasses.replace(config, preset=preset)
    sections = {item.name: getattr(config, item.name) for item in dataclasses.fields(config)}
    return dataclasses.replace(
        config, **{name: _tagged(value, preset) for name, value in sections.items() if dataclasses.is_dataclass(value)}
    )
