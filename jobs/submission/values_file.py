"""Reads the values of a cluster from a YAML file, in which every key must be a field."""

from __future__ import annotations

import dataclasses
import difflib
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import yaml

from jobs.submission.values import ClusterValues

Section = TypeVar("Section")


def read_values(path: str) -> ClusterValues:
    """Return the default values with those of a YAML file in their places; an empty path stands for no file.

    Raises:
        ValueError: if the file is no YAML, or a key or a value in it is not legal; the message names it.
        OSError: if the file cannot be read.
    """
    if not path:
        return ClusterValues()
    try:
        given = yaml.safe_load(Path(path).read_text()) or {}
    except yaml.YAMLError as error:
        raise ValueError(f"values = {path!r} is no YAML: {error}") from error
    return _with_values(ClusterValues(), given, where="")


def _with_values(section: Section, given: Any, *, where: str) -> Section:
    """Return a copy of a dataclass with values from a mapping; `where` is the path of the section, for messages."""
    if not isinstance(given, dict):
        raise ValueError(f"{where or 'the values'} must be a mapping of fields to values, not {given!r}")
    kinds = get_type_hints(type(section))
    changes: dict[str, Any] = {}
    for name, value in given.items():
        place = f"{where}.{name}" if where else str(name)
        if name not in kinds:
            near = difflib.get_close_matches(str(name), kinds, n=1)
            raise ValueError(
                f"{place} is no field: {f'did you mean {near[0]}?' if near else f'there are {list(kinds)}'}"
            )
        now = getattr(section, name)
        if dataclasses.is_dataclass(now):
            changes[name] = _with_values(now, value, where=place)
        elif type(value) is not kinds[name]:
            raise ValueError(f"{place} = {value!r} must be of type {kinds[name].__name__}")
        else:
            changes[name] = value
    return dataclasses.replace(section, **changes)  # type: ignore[type-var]
