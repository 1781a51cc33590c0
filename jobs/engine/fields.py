"""What the fields of a configuration tell beside their values: whether they identify a run, are paths, or replace another."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

Section = TypeVar("Section")

FREE_TO_CHANGE = {"is_free_to_change": True}
"""Metadata of a field that may change when a run is continued, such as how often it logs, or how it uses the machines.

All other fields identify the run (`jobs.engine.identity`).
"""
PATH = {"is_path": True}
"""Metadata of a field that can hold a local path, which :func:`with_absolute_paths` makes absolute for the workers."""


def added_later(value: Any) -> dict[str, Any]:
    """Return the metadata of a field that earlier versions did not have, and that identifies a run.

    Earlier runs behaved as if it had `value`. A run with this value therefore has the same hash as they have, and
    continues them.
    """
    return {"value_before": value}


def recorded_as(**values: str) -> dict[str, Any]:
    """Return the metadata of a field with values that identify a run as other values do, which are equal up to rounding."""
    return {"recorded_as": values}


def stands_for(name: str) -> dict[str, str]:
    """Return the metadata of a field that can leave its value to the machine where a run starts.

    The property `name` of its section has the value, which :func:`resolve_fields` puts into the field.
    """
    return {"stands_for": name}


def resolve_fields(config: Section) -> Section:
    """Return a copy of a section or configuration without fields that leave their value to the machine."""
    changes: dict[str, Any] = {}
    for item in dataclasses.fields(config):  # type: ignore[arg-type]  # a dataclass
        if dataclasses.is_dataclass(value := getattr(config, item.name)):
            changes[item.name] = resolve_fields(value)
        elif name := item.metadata.get("stands_for"):
            changes[item.name] = getattr(config, name)
    return dataclasses.replace(config, **changes)  # type: ignore[type-var]  # a dataclass


def alternative(name: str) -> dict[str, str]:
    """Return the metadata of an optional field that stands for the same as another one of its section.

    A value of it on the command line makes the other one None, unless that is given too.
    """
    return {"alternative": name}


def absolute_path(value: str) -> str:
    """Return a local path as an absolute one, because the workers have another working directory.

    URIs, hub names and paths that do not exist are returned unchanged, unless they are patterns (`{0..3}`, `*`). A file
    keeps its own name even if it is a symbolic link, because the suffix tells the format.
    """
    path = Path(value)
    if not value or "://" in value or not path.exists():
        is_pattern = "://" not in value and bool({"{", "*"} & set(value))
        return str(path.absolute()) if is_pattern else value
    return str(path.resolve() if path.is_dir() else path.parent.resolve() / path.name)


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


def values_of(section: Any, base: type) -> dict[str, Any]:
    """Return the values of the fields that a section inherits from a dataclass of the library."""
    return {item.name: getattr(section, item.name) for item in dataclasses.fields(base)}


def check_positive(section: str, config: Any, *names: str) -> None:
    """Raise ValueError if a named value of a section is not positive or not finite."""
    for name in names:
        value = getattr(config, name)
        if not 0 < value < math.inf:  # also refuses NaN
            raise ValueError(f"{section}.{name} = {value} must be positive" + (" and finite" if value > 0 else ""))


def check_not_negative(section: str, config: Any, *names: str) -> None:
    """Raise ValueError if a named value of a section is negative or not finite."""
    for name in names:
        value = getattr(config, name)
        if not 0 <= value < math.inf:
            raise ValueError(f"{section}.{name} = {value} must not be negative" + (" but finite" if value > 0 else ""))


def check_share(section: str, config: Any, *names: str) -> None:
    """Raise ValueError if a named value of a section does not lie in [0, 1]."""
    for name in names:
        value = getattr(config, name)
        if not 0.0 <= value <= 1.0:
            raise ValueError(f"{section}.{name} = {value:g} must lie in [0, 1]")


def named_values(field_name: str, values: Sequence[str]) -> dict[str, str]:
    """Parse a list of `NAME=VALUE` into a dictionary."""
    split = [text.partition("=") for text in values]
    for text, (name, _, value) in zip(values, split, strict=True):
        if not (name and value) or not all(character.isalnum() or character in "-_." for character in name):
            raise ValueError(f"{field_name}: {text!r} is not NAME=VALUE, with letters, digits and -_. in the name")
    if again := find_duplicate(name for name, _, _ in split):
        raise ValueError(f"{field_name} names {again!r} twice")
    return {name: value for name, _, value in split}


def parse_resources(field_name: str, values: Sequence[str]) -> dict[str, float]:
    """Parse a list of `NAME=AMOUNT` of custom Ray resources into a dictionary."""
    resources: dict[str, float] = {}
    for name, amount in named_values(field_name, values).items():
        try:
            resources[name] = float(amount)
        except ValueError:
            resources[name] = 0.0
        if not 0.0 < resources[name] < math.inf:
            raise ValueError(f"{field_name}: the amount of {name}={amount} must be a positive number, such as 0.1")
    return resources


def find_duplicate(names: Iterable[str]) -> str:
    """Return the first name that occurs more than once; empty if there is none."""
    return next((name for name, count in Counter(names).items() if count > 1), "")
