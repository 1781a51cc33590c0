"""The record of a run's whole configuration in its directory, from which the run can be rebuilt without its command."""

from __future__ import annotations

import dataclasses
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from jobs.engine.config import TrainingConfig
from jobs.engine.fields import resolve_fields, with_absolute_paths
from jobs.engine.masking import masked
from pipelines.storage import read_json, write_json

Config = TypeVar("Config")

_FILE = "task.json"


def write_task(config: TrainingConfig) -> None:
    """Write the configuration, with absolute paths and without passwords, into the directory of the run."""
    run = dataclasses.replace(config.run, storage=config.run.resolved_storage)
    values = dataclasses.asdict(with_absolute_paths(resolve_fields(dataclasses.replace(config, run=run))))
    write_json(
        f"{config.run.directory}/{_FILE}",
        {"configuration_class": type(config).__name__, "configuration": masked(values)},
    )


def read_task(directory: str) -> tuple[str, dict[str, Any]]:
    """Return the name of the class of a run's configuration, and the values that :func:`configuration_from` takes.

    Raises:
        FileNotFoundError: if the directory holds no record of a run.
        ValueError: if the record is damaged.
    """
    content = read_json(f"{directory}/{_FILE}")
    if content is None:
        raise FileNotFoundError(
            f"{directory} holds no {_FILE}: it is not the directory of a run, or the run is of an older version; start the "
            "command of the run again, which writes the file"
        )
    try:
        return content["configuration_class"], content["configuration"]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{directory}/{_FILE} is damaged: it does not hold a configuration") from error


def configuration_from(kind: type[Config], values: dict[str, Any]) -> Config:
    """Return the configuration whose nested values are given; lists become tuples where the field is a tuple.

    Raises:
        ValueError: if a value is refused, or a field is unknown.
    """
    hints = get_type_hints(kind)
    known = {item.name for item in dataclasses.fields(kind)}  # type: ignore[arg-type]  # a dataclass
    if unknown := sorted(values.keys() - known):
        raise ValueError(f"{kind.__name__} has no field {', '.join(unknown)}: the run is of another version")
    return kind(**{name: _value(hints[name], value) for name, value in values.items()})


def _value(hint: Any, value: Any) -> Any:
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return configuration_from(hint, value)
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    if isinstance(value, list) and any(get_origin(kind) is tuple for kind in kinds):
        return tuple(value)
    return value
