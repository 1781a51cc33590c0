"""What a training run is, and what it gave, as aligned lines for a person: the lines that all kinds of training share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from jobs.engine import rivals
from jobs.engine.config import TrainingConfig
from jobs.engine.identity import configuration_hash
from jobs.engine.masking import masked

_NAME_WIDTH = 13


def describe_plan(
    config: TrainingConfig,
    *,
    about: Mapping[str, str],
    num_units: int,
    unit: str,
    readers: str = "",
    parameters: str,
    state_gib: float,
    tracking_uri: str,
    notes: Iterable[str] = (),
) -> str:
    """The plan of a run.

    Args:
        about: name → line, of what only this kind of training has.
        num_units: trained on in a step; `unit` is what they are called.
        readers: of the workers, where there is something to say.
        state_gib: of a worker, for weights, gradients and optimizer.
    """
    run, workers = config.run, config.workers
    lines = {
        "run": f"{run.name} in {run.directory} (configuration {configuration_hash(config)})",
        **about,
        "steps": f"{run.num_steps} = {run.num_steps * num_units:,} {unit}; checkpoint every {run.checkpoint_every}, "
        f"validation every {config.validation.every}",
        "workers": f"{workers.num_workers} × {'1 GPU' if workers.use_gpu else 'CPU'}, ZeRO {workers.zero_stage}, "
        f"{workers.precision}{readers}",
        "parameters": parameters,
        "memory": f"{state_gib:.2f} GiB a worker for weights, gradients and optimizer",
        "MLflow": masked(tracking_uri) or "off",
    }
    rows = [*lines.items(), *(("note", note) for note in notes)]
    return "\n".join(f"{name:<{_NAME_WIDTH}}{line}" for name, line in rows)


def results(rows: Iterable[tuple[str, str]], outcome: Mapping[str, Any], unit: str) -> str:
    """The table of a finished run: its own rows, what its TempNet is worth, then speed, waiting, steps and epochs."""
    rows = [*rows, *rivals.rows(outcome)]
    if speed := outcome[f"{unit}_per_second"]:
        rows.append(("training speed", f"{speed:,.0f} {unit}/s"))
        rows.append(("share of the time spent waiting for data", f"{outcome['data_wait_share']:.2%}"))
    rows.append(("steps, epochs", f"{outcome['num_steps']}, {outcome['num_epochs']:.2f}"))
    if reason := outcome.get("stopped"):
        rows.append(("STOPPED", reason))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in rows)
