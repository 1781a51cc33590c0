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
from jobs.scoring.language_models.windows import ScoredWindow
from jobs.scoring.models import ModelSpec
from jobs.scoring.units import UnitStore

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
class EvaluationUnit:
    """One model at one temperature on one task, or on one slice of a task."""

    model: LanguageModelSpec
    temperature: Temperature
    task: str
    part: int
    """Number of the slice within the task, from 0."""
    key: str

    @property
    def file(self) -> str:
        """Name of the file with its result."""
        return f"{self.key}.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One item of work for a worker: the units of one model and task that share forward passes, one per temperature."""

    units: tuple[EvaluationUnit, ...]
    windows: tuple[ScoredWindow, ...] = ()
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


def unit_store(directory: str) -> UnitStore:
    """Returns the store of the finished units of an evaluation, given by its directory (a path or a URI)."""
    return UnitStore(f"{directory}/units")


def read_result(store: UnitStore, unit: EvaluationUnit) -> dict[str, Any] | None:
    """Returns the result of a unit, or None if it is not finished."""
    record = store.read_json(unit.file)
    return record and record["result"]


def read_arrays(store: UnitStore, unit: EvaluationUnit) -> dict[str, np.ndarray]:
    """Returns the arrays `tau` and `entropy` of a unit, with one value per target."""
    return safetensors.numpy.load(store.read(f"{unit.key}.safetensors"))


def files_of(unit: EvaluationUnit, outcome: Score | dict[str, float], seconds: float) -> dict[str, Any]:
    """Returns the files of a finished unit, given the seconds that its job took.

    The JSON file comes last, since its existence marks the unit as finished.
    """
    files: dict[str, Any] = {}
    result: Mapping[str, Any]
    if isinstance(outcome, Score):
        names = ("nll", "num_tokens", "num_windows", "num_greedy")
        result = {name: getattr(outcome, name) for name in names}
        if unit.temperature.needs_tempnet:
            arrays = {name: np.concatenate(getattr(outcome, name)) for name in ("tau", "entropy")}
            files[f"{unit.key}.safetensors"] = safetensors.numpy.save(arrays)
    else:
        result = outcome
    return files | {
        unit.file: {
            "model": unit.model.path,
            "tempnet": unit.model.tempnet,
            "temperature": unit.temperature.name,
            "task": unit.task,
            "part": unit.part,
            "seconds": round(seconds, 3),
            "result": result,
        }
    }
