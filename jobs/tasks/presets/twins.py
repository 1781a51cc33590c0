"""Adds a small version (twin) to every preset, which two CPU cores can run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

Config = TypeVar("Config")


def with_twins(
    presets: Mapping[str, Callable[[], Config]], small: Callable[[Config], Config], data: str
) -> dict[str, Callable[[], Config]]:
    """Return the presets and their twins, which come first and have names that end in `-small`.

    Args:
        presets: preset name → function that returns its configuration.
        small: converts a configuration into that of its twin.
        data: the data that the twins use, for their help text.
    """

    def twin_of(preset: Callable[[], Config]) -> Callable[[], Config]:
        def twin() -> Config:
            return small(preset())

        twin.__doc__ = f"Two cores, {data}: {(preset.__doc__ or '').strip()}"
        return twin

    return {f"{name}-small": twin_of(preset) for name, preset in presets.items()} | dict(presets)
