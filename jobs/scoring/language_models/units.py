"""Units of work, and the ledger of those that are finished: one JSON file a unit, named by a hash of what decides its result.

The batch size, the workers and the device are no part of the hash: they change nothing but the last digits.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import safetensors.numpy
from pipelines.storage import read_json, resolve, write_json

from jobs.scoring.language_models.scoring import Score
from jobs.scoring.language_models.temperatures import Temperature
from jobs.scoring.language_models.windows import Window

# Goes up whenever this program would compute something else from the same input.
_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A model as data that travels to the workers."""

    label: str
    """How it is called in the results."""
    path: str
    tempnet: str
    """Where its TempNet is; empty: it has none."""
    vocab_size: int | None
    """With a TempNet: the effective vocabulary; logits beyond it are left out."""
    max_length: int
    digest: str
    """Of the base model's files."""
    tempnet_digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A model at a temperature on a task, or on a slice of one."""

    model: ModelSpec
    temperature: Temperature
    task: str
    part: int
    """The ordinal of the slice."""
    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a worker does at a time: units of one model and one task that share a forward pass, one a temperature."""

    units: tuple[Unit, ...]
    windows: tuple[Window, ...] = ()
    """What to score; empty for a task of the harness."""

    @property
    def title(self) -> str:
        """For a person."""
        first = self.units[0]
        part = f" part {first.part + 1}" if self.windows else ""
        return f"{first.model.label} · {first.task}{part} · {', '.join(unit.temperature.name for unit in self.units)}"


def unit_key(model: ModelSpec, temperature: Temperature, dtype: str, **what: Any) -> str:
    """24 hex digits of all that decides the result of a unit."""
    content = {
        "version": _VERSION,
        "model": model.digest,
        "vocab_size": model.vocab_size,
        "temperature": temperature.name,
        "tempnet": model.tempnet_digest if temperature.needs_tempnet else None,
        "dtype": dtype,
        **what,
    }
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=12).hexdigest()


class Ledger:
    """The finished units of an evaluation directory (a path or a URI)."""

    def __init__(self, directory: str) -> None:
        self._directory = f"{directory}/units"
        filesystem, path = resolve(self._directory)
        filesystem.create_dir(path, recursive=True)

    def read(self, unit: Unit) -> dict[str, Any] | None:
        """The result of a unit, or None if it is not finished."""
        record = read_json(f"{self._directory}/{unit.key}.json")
        return record and record["result"]

    def arrays(self, unit: Unit) -> dict[str, np.ndarray]:
        """`tau` and `entropy`, one value a target."""
        filesystem, path = resolve(f"{self._directory}/{unit.key}.safetensors")
        with filesystem.open_input_stream(path) as stream:
            return safetensors.numpy.load(stream.read())

    def write(self, unit: Unit, outcome: Score | dict[str, float], seconds: float) -> None:
        """Record a finished unit, with the seconds that its job took; its JSON file comes last."""
        result: Mapping[str, Any]
        if isinstance(outcome, Score):
            names = ("nll", "num_tokens", "num_windows", "num_greedy")
            result = {name: getattr(outcome, name) for name in names}
            if unit.temperature.needs_tempnet:
                arrays = {name: np.concatenate(getattr(outcome, name)) for name in ("tau", "entropy")}
                filesystem, path = resolve(f"{self._directory}/{unit.key}.safetensors")
                with filesystem.open_output_stream(path) as stream:
                    stream.write(safetensors.numpy.save(arrays))
        else:
            result = outcome
        record = {
            "model": unit.model.path,
            "tempnet": unit.model.tempnet,
            "temperature": unit.temperature.name,
            "task": unit.task,
            "part": unit.part,
            "seconds": round(seconds, 3),
            "result": result,
        }
        write_json(f"{self._directory}/{unit.key}.json", record)
