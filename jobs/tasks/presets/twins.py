"""Makes a small version (twin) of every preset, which two CPU cores can run, and records the names of presets in MLflow."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from jobs.engine.config import TrackingSection

Config = TypeVar("Config")


def twins_of(
    presets: Mapping[str, Callable[[], Config]],
    small: Callable[[Config], Config],
    data: str,
    *,
    aliases: Mapping[str, str] | None = None,
) -> dict[str, Callable[[], Config]]:
    """Return the twins of the presets, whose names end in `-small`.

    Args:
        presets: preset name → function that returns its configuration.
        small: converts a configuration into that of its twin.
        data: the data that the twins use, for their help text.
        aliases: preset name → name of the preset whose twin trains the same; the twin's help text says so.
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
