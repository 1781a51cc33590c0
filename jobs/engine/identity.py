"""Configurations as flat fields: what identifies a run, its hash, how two configurations differ, and changing fields."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from jobs.engine.masking import masked

Config = TypeVar("Config")

_NO_VALUE = object()
# These neither shape the weights nor order the data, whatever their type.
_FREE_FIELDS = re.compile(r"run\.(name|num_steps|start_from)|(validation|tracking)\..*|optimizer\.decay")


def flatten(config: Any) -> dict[str, Any]:
    """Convert a nested dataclass into a dictionary `section.field` → value."""
    return {name: value for name, value, _ in flat_fields(config)}


def flat_fields(config: Any, prefix: str = "") -> Iterator[tuple[str, Any, Mapping[str, Any]]]:
    """Yield name (`section.field`), value and metadata of every field of a nested dataclass.

    The value is that which the run has, also where the field leaves it to the machine.
    """
    for item in dataclasses.fields(config):
        value = getattr(config, item.metadata.get("stands_for", item.name))
        if dataclasses.is_dataclass(value):
            yield from flat_fields(value, f"{prefix}{item.name}.")
        else:
            yield prefix + item.name, value, item.metadata


def with_fields(config: Config, values: Mapping[str, Any]) -> Config:
    """Return a copy of a configuration with fields (`section.field`) set to the given values.

    Raises:
        ValueError: if a field does not exist (the message suggests similar names), or a value is refused.
    """
    check_fields(values, [config])
    known = flatten(config)
    nested: dict[str, Any] = {}
    for name, value in values.items():
        _check_type(config, name, value)
        *sections, field = name.split(".")
        changes = nested
        for section in sections:
            changes = changes.setdefault(section, {})
        changes[field] = float(value) if isinstance(known[name], float) and type(value) is int else value
    return _replace(config, nested)


def _replace(config: Config, changes: Mapping[str, Any]) -> Config:
    """Return a copy of a nested dataclass with changes that are nested in the same way."""
    values = {
        name: _replace(held, value) if dataclasses.is_dataclass(held := getattr(config, name)) else value
        for name, value in changes.items()
    }
    return dataclasses.replace(config, **values)  # type: ignore[type-var]  # a dataclass


def _check_type(config: Any, name: str, value: Any) -> None:
    *sections, field = name.split(".")
    for section in sections:
        config = getattr(config, section)
    hint = get_type_hints(type(config))[field]
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    options = [option for kind in kinds if get_origin(kind) is Literal for option in get_args(kind)]
    plain = tuple(kind for kind in kinds if isinstance(kind, type))
    others = [kind for kind in kinds if get_origin(kind) not in (None, Literal)]  # sequences, which are not checked
    fits = isinstance(value, plain) and (bool in plain or not isinstance(value, bool))
    if fits or value in options or others or (float in plain and type(value) is int):
        return
    legal = [*map(repr, options), *("None" if kind is NoneType else kind.__name__ for kind in plain)]
    raise ValueError(f"{name} = {value!r} must be {' or '.join(legal)}")


def check_fields(names: Iterable[str], configs: Iterable[Any]) -> None:
    """Check that every field (`section.field`) exists in at least one of the configurations.

    Raises:
        ValueError: if a field does not exist; the message suggests similar names.
    """
    known = dict.fromkeys(name for config in configs for name in flatten(config))
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
            raise ValueError(f"there is no field {name}: did you mean {' or '.join(near) or 'another'}?")


def fixed_values(config: Any) -> dict[str, Any]:
    """Return the fields that identify a run, or a group of runs.

    These are all that are not marked with `FREE_TO_CHANGE`, without those that are marked with `added_later` and have the
    value that earlier runs stand for. Secrets in URIs are masked, so that they are not recorded and may be renewed.
    """
    return {
        name: masked(value)
        for name, value, metadata in flat_fields(config)
        if not metadata.get("is_free_to_change", False) and metadata.get("value_before", _NO_VALUE) != value
    }


def recorded_values(config: Any) -> dict[str, Any]:
    """Return the fields that identify a run as its `configuration.json` holds them, such as tuples as lists."""
    values: dict[str, Any] = json.loads(json.dumps(fixed_values(config)))
    return values


def configuration_hash(config: Any) -> str:
    """Return a hash (12 hex digits) of the fields that identify a run."""
    content = json.dumps(fixed_values(config), sort_keys=True)
    return hashlib.blake2b(content.encode(), digest_size=6).hexdigest()


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Return `field: old → new` for every field that differs between two configurations."""
    return [
        f"{name}: {old.get(name)!r} → {new.get(name)!r}"
        for name in sorted(old.keys() | new.keys())
        if not _equal(old.get(name), new.get(name))
    ]


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=1e-12, abs_tol=0.0)
    return a == b


def may_differ(name: str, held: object, own: object) -> bool:
    """Return whether a run may have another value of a field than the run from whose checkpoint it starts."""
    are_decimal = all(value is None or isinstance(value, float) for value in (held, own))
    return bool(_FREE_FIELDS.fullmatch(name)) or (are_decimal and not name.startswith("data."))
