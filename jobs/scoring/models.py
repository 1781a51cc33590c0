"""The models that are scored: their descriptions, the labels that results show, and the one that a worker holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Description of a model, to be sent to the workers."""

    label: str
    path: str
    """Absolute path or URI of its directory, or its hub name."""
    digest: str
    """Digest of the files that decide its outputs; TempNets have digests of their own."""


Spec = TypeVar("Spec", bound=ModelSpec)
Model = TypeVar("Model")


class LoadedModel(Generic[Spec, Model]):
    """The model that a worker used last; it is freed before another one is loaded."""

    def __init__(self, load: Callable[[Spec], Model]) -> None:
        self._load = load
        self._spec: Spec | None = None
        self._model: Model | None = None

    def get(self, spec: Spec) -> Model:
        if self._model is None or self._spec != spec:
            self._model = None
            self._model, self._spec = self._load(spec), spec
        return self._model


def model_labels(paths: Sequence[str]) -> list[str]:
    """Returns a short, distinct label for every model path.

    The label of `<run>/export` is the name of the run, and that of any other path is its last part. Models that would
    share a short name are labelled with their whole path. If the same path occurs several times, its labels are
    numbered.
    """
    parts = [[part for part in path.split("/") if part] for path in paths]
    short = [names[-2] if names[-1] == "export" and len(names) > 1 else names[-1] for names in parts]
    counts = Counter(short)
    labels = [name if counts[name] == 1 else path for name, path in zip(short, paths, strict=True)]
    seen = Counter(labels)
    numbered = Counter[str]()
    for index, label in enumerate(labels):
        if seen[label] > 1:  # the same path more than once: one model with several TempNets
            numbered[label] += 1
            labels[index] = f"{label} ({numbered[label]})"
    return labels
