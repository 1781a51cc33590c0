"""Formats the plan and the results of a training run as aligned lines of text; covers the lines that all tasks share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from jobs.engine import rivals
from jobs.engine.config import TrainingConfig
from jobs.engine.identity import configuration_hash
from jobs.engine.masking import masked
from jobs.engine.memory import describe_memory, training_memory

_NAME_WIDTH = 13


def describe_plan(
    config: TrainingConfig,
    *,
    about: Mapping[str, str],
    num_units: int,
    unit: str,
    readers: str = "",
    parameters: str,
    num_trained: int,
    num_frozen: int = 0,
    tracking_uri: str,
    notes: Iterable[str] = (),
    memory: Mapping[str, float] | None = None,
) -> str:
    """Format the plan of a run.

    Args:
        about: name → text of the lines that only this kind of task has.
        num_units: number of units that one step trains on.
        unit: what the units are called, such as tokens.
        readers: text to append to the line about the workers, such as who reads the data.
        parameters: text about the number of parameters.
        num_trained: number of trained parameters.
        num_frozen: number of frozen parameters.
        tracking_uri: address of MLflow; empty if the run is not logged.
        notes: further lines of text.
        memory: item → bytes of a worker at its peak; None: activations and losses are not counted.
    """
    run, workers = config.run, config.workers
    state = training_memory(workers, num_trained=num_trained, num_frozen=num_frozen)
    lines = {
        "run": f"{run.name} in {run.directory} (configuration {configuration_hash(config)})",
        **about,
        "steps": f"{run.num_steps} = {run.num_steps * num_units:,} {unit}; checkpoint every {run.checkpoint_every}, "
        f"validation every {config.validation.every}",
        "workers": f"{workers.num_workers} × {'1 GPU' if workers.use_gpu else 'CPU'}, ZeRO {workers.zero_stage}, "
        f"{workers.resolved_precision}{readers}",
        "parameters": parameters,
        "memory": describe_memory(memory) if memory else f"{describe_memory(state)}; activations are not counted",
        "MLflow": masked(tracking_uri) or "off",
    }
    rows = [*lines.items(), *(("note", note) for note in notes)]
    return "\n".join(f"{name:<{_NAME_WIDTH}}{line}" for name, line in rows)


def results(rows: Iterable[tuple[str, str]], outcome: Mapping[str, Any], unit: str) -> str:
    """Format the results of a finished run: the given rows, the verdict on its TempNet, then speed, steps and epochs."""
    rows = [*rows, *rivals.rows(outcome)]
    if speed := outcome[f"{unit}_per_second"]:
        rows.append(("training speed", f"{speed:,.0f} {unit}/s"))
        rows.append(("share of the time spent waiting for data", f"{outcome['data_wait_share']:.2%}"))
    if retries := outcome.get("store_retries"):
        rows.append(("repeated requests to object stores", f"{retries}"))
    num_epochs = outcome["num_epochs"]  # None if the run ended before all of its data were prepared
    rows.append(
        ("steps, epochs", f"{outcome['num_steps']}, {'below 1' if num_epochs is None else f'{num_epochs:.2f}'}")
    )
    if reason := outcome.get("stopped"):
        rows.append(("STOPPED", reason))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in rows)
