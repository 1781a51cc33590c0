"""Units of work, and the ledger of finished ones: one JSON file per unit, named by a hash.

The hash covers everything that decides a unit's result. It leaves out the batch size, the workers and the device, which
affect only the last digits.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import safetensors.numpy

from jobs.scoring.language_models.scoring import Score
from jobs.scoring.language_models.temperatures import Temperature
from jobs.scoring.language_models.windows import Window
from jobs.scoring.models import ModelSpec
from pipelines.storage import read_json, resolve, write_json

# Increase this whenever the same input would give another result.
_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageModelSpec(ModelSpec):
    """Description of a language model and its TempNet."""

    tempnet: str
    """Location of its TempNet; empty if it has none."""
    vocab_size: int | None
    """The effective vocabulary of a model with a TempNet, whose further logits are ignored; None without a TempNet."""
    max_length: int
    """Maximum number of tokens that the model reads at once."""
    tempnet_digest: str
    """Digest of the TempNet; empty if it has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """One model at one temperature on one task, or on one slice of a task."""

    model: LanguageModelSpec
    temperature: Temperature
    task: str
    part: int
    """Number of the slice within the task, from 0."""
    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One item of work for a worker: the units of one model and task that share forward passes, one per temperature."""

    units: tuple[Unit, ...]
    windows: tuple[Window, ...] = ()
    """The windows to score; empty for a task of the harness."""

    @property
    def title(self) -> str:
        """Name of the job in messages."""
        first = self.units[0]
        part = f" part {first.part + 1}" if self.windows else ""
        return f"{first.model.label} · {first.task}{part} · {', '.join(unit.temperature.name for unit in self.units)}"


def unit_key(model: LanguageModelSpec, temperature: Temperature, dtype: str, **what: Any) -> str:
    """Returns a hash of everything that decides the result of a unit, as 24 hex digits."""
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
    """Stores the results of finished units in the directory of an evaluation (a path or a URI)."""

    def __init__(self, directory: str) -> None:
        self._directory = f"{directory}/units"
        filesystem, path = resolve(self._directory)
        filesystem.create_dir(path, recursive=True)

    def read(self, unit: Unit) -> dict[str, Any] | None:
        """Returns the result of a unit, or None if it is not finished."""
        record = read_json(f"{self._directory}/{unit.key}.json")
        return record and record["result"]

    def arrays(self, unit: Unit) -> dict[str, np.ndarray]:
        """Returns the arrays `tau` and `entropy` of a unit, with one value per target."""
        filesystem, path = resolve(f"{self._directory}/{unit.key}.safetensors")
        with filesystem.open_input_stream(path) as stream:
            return safetensors.numpy.load(stream.read())

    def write(self, unit: Unit, outcome: Score | dict[str, float], seconds: float) -> None:
        """Store the result of a unit, with the seconds that its job took.

        The JSON file is written last, since its existence marks the unit as finished.
        """
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
