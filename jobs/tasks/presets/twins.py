"""Presets whose every experiment has a twin that two CPU cores can run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

Config = TypeVar("Config")


def with_twins(
    presets: Mapping[str, Callable[[], Config]], small: Callable[[Config], Config], data: str
) -> dict[str, Callable[[], Config]]:
    """The presets and their twins, named by `-small`, the twins first.

    Args:
        small: makes a configuration its twin.
        data: what the twins run on, for their help.
    """

    def twin_of(preset: Callable[[], Config]) -> Callable[[], Config]:
        def twin() -> Config:
            return small(preset())

        twin.__doc__ = f"Two cores, {data}: {(preset.__doc__ or '').strip()}"
        return twin

    return {f"{name}-small": twin_of(preset) for name, preset in presets.items()} | dict(presets)
