"""The fields of configurations: what they tell beside their values, what identifies a run, its hash, and files of fields."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from jobs.engine.masking import MASK, masked

Config = TypeVar("Config")

FREE_TO_CHANGE = {"is_free_to_change": True}
"""Metadata of a field that may change when a run is continued; all others identify the run (:func:`fixed_values`)."""
PATH = {"is_path": True}
"""Metadata of a field that can hold a local path, which :func:`with_absolute_paths` makes absolute for the workers."""


def added_later(value: Any) -> dict[str, Any]:
    """Return the metadata of a field that identifies a run unless it has the value of runs from before the field."""
    return {"value_before": value}


def recorded_as(**values: str) -> dict[str, Any]:
    """Return the metadata of a field with values that identify a run as other values do, which are equal up to rounding."""
    return {"recorded_as": values}


def none_was_recorded_as(value: Any) -> dict[str, Any]:
    """Return the metadata of a field whose None has the hash of a value, whatever it stands for."""
    return {"none_was_recorded_as": value}


def stands_for(name: str) -> dict[str, str]:
    """Return the metadata of a field that can leave its value to the machine, by a property of its section."""
    return {"stands_for": name}


def resolve_fields(config: Config) -> Config:
    """Return a copy of a section or configuration without fields that leave their value to the machine."""
    values = {name: value for name, value, metadata in flat_fields(config) if "stands_for" in metadata}
    return with_fields(config, values)


def alternative(name: str) -> dict[str, str]:
    """Return the metadata of an optional field that makes another one of its section None if it is given."""
    return {"alternative": name}


def absolute_path(value: str) -> str:
    """Return a local path that exists, or a pattern (`{0..3}`, `*`), as an absolute one, for workers elsewhere.

    A file keeps its own name even if it is a symbolic link, because the suffix tells the format.
    """
    path = Path(os.path.expanduser(value))
    if not value or "://" in value or not path.exists():
        is_pattern = "://" not in value and bool({"{", "*"} & set(value))
        return str(path.absolute()) if is_pattern else value
    return str(path.resolve() if path.is_dir() else path.parent.resolve() / path.name)


def with_absolute_paths(config: Config) -> Config:
    """Return a copy of a section or configuration with :func:`absolute_path` applied to its fields that are paths."""
    paths = {name: value for name, value, metadata in flat_fields(config) if metadata.get("is_path")}
    return with_fields(config, {name: absolute_path(value) for name, value in paths.items()})


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


_NO_VALUE = object()
# These neither shape the weights nor order the data, whatever their type.
_FREE_FIELDS = re.compile(r"run\.(name|num_steps|start_from)|(validation|tracking)\..*|optimizer\.decay")


def flatten(config: Any) -> dict[str, Any]:
    """Convert a nested dataclass into a dictionary `section.field` → value."""
    return {name: value for name, value, _ in flat_fields(config)}


def flat_fields(config: Any, prefix: str = "") -> Iterator[tuple[str, Any, Mapping[str, Any]]]:
    """Yield name (`section.field`), value (as the run has it) and metadata of every field of a nested dataclass."""
    for item in dataclasses.fields(config):
        value = getattr(config, item.metadata.get("stands_for", item.name))
        if dataclasses.is_dataclass(value):
            yield from flat_fields(value, f"{prefix}{item.name}.")
        else:
            yield prefix + item.name, value, item.metadata


def with_fields(config: Config, values: Mapping[str, Any]) -> Config:
    """Return a copy of a configuration with fields (`section.field`) set to the given values."""
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
    if get_origin(hint) is tuple:
        kind = get_args(hint)[0]
        if not isinstance(value, tuple | list) or not all(_fits((kind,), item) for item in value):
            raise ValueError(f"{name} = {value!r} must be a list of {kind.__name__}")
        return
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    options = [option for kind in kinds if get_origin(kind) is Literal for option in get_args(kind)]
    plain = tuple(kind for kind in kinds if isinstance(kind, type))
    if value not in options and not _fits(plain, value):
        legal = [*map(repr, options), *("None" if kind is NoneType else kind.__name__ for kind in plain)]
        raise ValueError(f"{name} = {value!r} must be {' or '.join(legal)}")


def _fits(kinds: tuple[type, ...], value: Any) -> bool:
    is_number = float in kinds and type(value) is int
    return is_number or (isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool)))


def check_fields(names: Iterable[str], configs: Iterable[Any]) -> None:
    """Check that every field (`section.field`) exists in at least one of the configurations."""
    known = dict.fromkeys(name for config in configs for name in flatten(config))
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
            raise ValueError(f"there is no field {name}: did you mean {' or '.join(near) or 'another'}?")


def fixed_values(config: Any) -> dict[str, Any]:
    """Return the fields that identify a run: those that are neither `FREE_TO_CHANGE`, nor `added_later` and as before.

    Secrets in URIs are masked, so that they are not recorded and may be renewed.
    """
    return {
        name: masked(metadata.get("recorded_as", {}).get(value, value) if isinstance(value, str) else value)
        for name, value, metadata in flat_fields(config)
        if not metadata.get("is_free_to_change", False) and metadata.get("value_before", _NO_VALUE) != value
    }


def recorded_values(config: Any) -> dict[str, Any]:
    """Return the fields that identify a run as its `configuration.json` holds them, such as tuples as lists."""
    values: dict[str, Any] = json.loads(json.dumps(fixed_values(config)))
    return values


def configuration_hash(config: Any) -> str:
    """Return a hash (12 hex digits) of the fields that identify a run."""
    values = fixed_values(config)
    nones = {name: metadata.get("none_was_recorded_as") for name, _, metadata in flat_fields(config)}
    content = {name: nones[name] if value is None else value for name, value in values.items()}
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=6).hexdigest()


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


_EXPONENT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)e[-+]?\d+", re.IGNORECASE)
PRESET = "preset"
"""Key of a file that names the preset, which then need not be given on the command line."""


class _Loader(yaml.SafeLoader):
    """Reads `2:8` as text, which YAML 1.1 takes for a number to the base 60."""

    def resolve(self, kind: Any, value: Any, implicit: Any) -> Any:
        tag = super().resolve(kind, value, implicit)
        return self.DEFAULT_SCALAR_TAG if tag.endswith((":int", ":float")) and ":" in value else tag


def read_config_file(path: str) -> dict[str, Any]:
    """Return the fields of a file as `section.field` → value, and its preset under :data:`PRESET` if it names one."""
    try:
        content = _Loader(Path(path).read_text(encoding="utf-8-sig")).get_single_data()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ValueError(f"--config {path}: {reason}") from error
    except yaml.YAMLError as error:
        raise ValueError(f"--config {path} is no YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise ValueError(f"--config {path} must hold fields, as in `optimizer: {{batch_size: 8}}`")
    return dict(_flatten(content, path))


def _flatten(content: Mapping[Any, Any], path: str, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        if not isinstance(key, str):
            raise ValueError(f"--config {path}: {prefix}{key!r} is no name of a field")
        if isinstance(value, dict):
            yield from _flatten(value, path, f"{prefix}{key}.")
        else:
            yield prefix + key, tuple(value) if isinstance(value, list) else value


def apply_config_file(preset: Config, values: Mapping[str, Any], path: str) -> Config:
    """Return a preset with the fields of a file, of which one that is an `alternative` takes the place of the other."""
    given = {name: value for name, value in values.items() if name != PRESET}
    if hidden := [name for name, value in given.items() if MASK in str(value)]:
        raise ValueError(
            f"--config {path}: the secret in {' and '.join(hidden)} was masked: write it into the file again"
        )
    for name, held, metadata in flat_fields(preset):
        # YAML 1.1 reads 1e-4, which has no point, and 1.5e4, which has no sign, as a text.
        if not isinstance(held, str) and _EXPONENT.fullmatch(value := str(given.get(name))):
            given[name] = float(value)
        if (other := metadata.get("alternative")) and given.get(name) is not None:
            given.setdefault(f"{name.rpartition('.')[0]}.{other}", None)
    try:
        return with_fields(preset, given)
    except ValueError as error:
        raise ValueError(f"--config {path}: {error}") from error


def save_config_file(config: Any, preset: str, path: str) -> None:
    """Write all fields of a configuration, as they were given but masked, as YAML that only the user can read."""
    values = json.loads(json.dumps(masked(dataclasses.asdict(config))))  # YAML knows no tuples
    text = yaml.safe_dump({PRESET: preset, **values}, sort_keys=False, allow_unicode=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
