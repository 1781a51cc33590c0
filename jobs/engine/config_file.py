"""Configuration files: `--config FILE` gives fields of a preset in YAML, `--dry-run --save FILE` writes all of them.

A file holds sections (`optimizer: {batch_size: 8}`) or fields with their full names (`optimizer.batch_size: 8`). The
`configuration.json` in a run's directory has the latter form, and JSON is YAML. Options on the command line override it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml

from jobs.engine.identity import flat_fields, with_fields
from jobs.engine.masking import MASK, masked

Config = TypeVar("Config")

_EXPONENT = re.compile(r"[-+]?\d+e[-+]?\d+", re.IGNORECASE)
PRESET = "preset"
"""Key of a file that names the preset, which then need not be given on the command line."""


def read_config_file(path: str) -> dict[str, Any]:
    """Return the fields of a file as `section.field` → value, and its preset under :data:`PRESET` if it names one.

    Raises:
        ValueError: if the file is missing, is no YAML, or holds something other than fields; the message names the file.
    """
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8-sig"))
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
    """Return a preset with the fields of a file.

    Of two fields that are alternatives of each other, the one that the file gives replaces the other.

    Raises:
        ValueError: if a field does not exist (the message suggests similar names), its value is refused, or a secret in it
            was masked.
    """
    given = {name: value for name, value in values.items() if name != PRESET}
    if hidden := [name for name, value in given.items() if MASK in str(value)]:
        raise ValueError(
            f"--config {path}: the secret in {' and '.join(hidden)} was masked: write it into the file again"
        )
    for name, held, metadata in flat_fields(preset):
        # YAML 1.1 reads 1e-4, which has no point, as a text.
        if not isinstance(held, str) and _EXPONENT.fullmatch(value := str(given.get(name))):
            given[name] = float(value)
        if (other := metadata.get("alternative")) and given.get(name) is not None:
            given.setdefault(f"{name.rpartition('.')[0]}.{other}", None)
    try:
        return with_fields(preset, given)
    except ValueError as error:
        raise ValueError(f"--config {path}: {error}") from error


def save_config_file(config: Any, preset: str, path: str) -> None:
    """Write all fields of a configuration as YAML that `--config` reads; passwords in addresses are masked.

    Only the user can read the file.
    """
    content: dict[str, Any] = {PRESET: preset}
    for name, value, _ in flat_fields(config):
        *sections, field = name.split(".")
        section = content
        for key in sections:
            section = section.setdefault(key, {})
        section[field] = _plain(masked(value))
    text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
        file.write(text)


def _plain(value: Any) -> Any:
    return [_plain(item) for item in value] if isinstance(value, tuple | list) else value
