"""Data that trials share, prepared before they start: side by side they would write the same files."""

from __future__ import annotations

import json
from collections.abc import Iterable

from jobs.engine.identity import flatten
from jobs.engine.task import Plan


def prepare_once(plans: Iterable[Plan]) -> dict[str, tuple[str, str, str]]:
    """What every plan reads, once for each way to prepare it; needs Ray.

    Returns:
        Context → (name, digest, source URI), for MLflow; those of the second way are `train-1` and so on.
    """
    different: dict[str, Plan] = {}
    for plan in plans:
        data = {name: value for name, value in flatten(plan.config).items() if name.startswith("data.")}
        different.setdefault(json.dumps(data, sort_keys=True), plan)
    found: dict[str, tuple[str, str, str]] = {}
    for number, plan in enumerate(different.values()):
        for context, data_set in plan.prepare().data_sets.items():
            found[f"{context}-{number}" if number else context] = data_set
    return found
