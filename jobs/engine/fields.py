"""What the fields of a configuration tell beside their values: whether they identify a run, and whether they are paths."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, TypeVar

Section = TypeVar("Section")

FREE_TO_CHANGE = {"is_free_to_change": True}
"""Metadata of a field that may change when a run is continued, such as how often it logs, or how it uses the machines.

All other fields identify the run (`jobs.engine.identity`).
"""
PATH = {"is_path": True}
"""Metadata of a field that can hold a local path, which :func:`with_absolute_paths` makes absolute for the workers."""


def absolute_path(value: str) -> str:
    """Return a local path as an absolute one, because the workers have another working directory.

    URIs, hub names and paths that do not exist are returned unchanged.
    """
    return str(Path(value).resolve()) if value and "://" not in value and Path(value).exists() else value


def with_absolute_paths(config: Section) -> Section:
    """Return a copy of a section or configuration with :func:`absolute_path` applied to its fields that are paths."""
    changes: dict[str, Any] = {}
    for item in dataclasses.fields(config):  # type: ignore[arg-type]  # a dataclass
        value = getattr(config, item.name)
        if dataclasses.is_dataclass(value):
            changes[item.name] = with_absolute_paths(value)
        elif item.metadata.get("is_path"):
            changes[item.name] = absolute_path(value)
    return dataclasses.replace(config, **changes)  # type: ignore[type-var]


def shared_fields(section: Any, config_type: type) -> dict[str, Any]:
    """Return the values of a section's fields that a configuration of the library has under the same name.

    A field that is None is left out, so that the library's default applies. A section does not hold the library's
    configuration itself, because its fields would get another name on the command line and in what identifies a run.
    """
    names = {item.name for item in dataclasses.fields(config_type)}
    values = {item.name: getattr(section, item.name) for item in dataclasses.fields(section) if item.name in names}
    return {name: value for name, value in values.items() if value is not None}
