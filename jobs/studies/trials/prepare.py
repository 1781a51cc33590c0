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
    distinct: dict[str, Plan] = {}
    for plan in plans:
        data = {name: value for name, value in flatten(plan.config).items() if name.startswith("data.")}
        distinct.setdefault(json.dumps(data, sort_keys=True), plan)
    data_sets: dict[str, tuple[str, str, str]] = {}
    for number, plan in enumerate(distinct.values()):
        for context, data_set in plan.prepare().data_sets.items():
            data_sets[f"{context}-{number}" if number else context] = data_set
    return data_sets
