"""Makes a small version (twin) of every preset, which two CPU cores can run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

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
