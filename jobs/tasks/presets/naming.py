"""Records the name of a preset in its configuration, so that every run made from it has the name in MLflow."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from jobs.engine.config import TrackingSection

Config = TypeVar("Config")


def named(presets: Mapping[str, Callable[[], Config]]) -> dict[str, Callable[[], Config]]:
    """Return presets whose configurations have the name of the preset in `tracking.preset`."""

    def with_name(name: str, preset: Callable[[], Config]) -> Callable[[], Config]:
        @functools.wraps(preset)
        def configuration() -> Config:
            return _tagged(preset(), name)

        return configuration

    return {name: with_name(name, preset) for name, preset in presets.items()}


def _tagged(config: Any, preset: str) -> Any:
    """Set the preset's name in the tracking section, wherever it is nested: a sweep has it in its base configuration."""
    if isinstance(config, TrackingSection):
        return dataclasses.replace(config, preset=preset)
    sections = {item.name: getattr(config, item.name) for item in dataclasses.fields(config)}
    return dataclasses.replace(
        config, **{name: _tagged(value, preset) for name, value in sections.items() if dataclasses.is_dataclass(value)}
    )
