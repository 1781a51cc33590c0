"""Preparing the data that trials share, before they start; concurrent trials would otherwise write the same files."""

from __future__ import annotations

import json
from collections.abc import Iterable

from jobs.engine.identity import flatten
from jobs.engine.task import Plan


def prepare_once(plans: Iterable[Plan]) -> dict[str, tuple[str, str, str]]:
    """Prepare the data of all plans, once for each distinct data configuration. Ray must be running.

    Returns:
        context → (name, digest, source URI), for MLflow. The contexts of the second data configuration are `train-1`
            and so on.
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
