"""Short names of models for the headings of result tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence


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
